"""model.adapter: a new run begins with the weights of an adapter, of a folder or of the Hub, and a fresh optimizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.base.identity import BASE_CONTENT, content_of
from finetune.cli.main import main as cli
from finetune.files import read_lines
from finetune.recipe.loader import load_recipe
from finetune.train import main
from finetune.training.start_adapter import StartAdapter
from finetune.untrusted.safetensors_header import add_metadata
from tests.support.hub import Hub, running_hub
from tests.support.hub.processes import run_python
from tests.support.hub.server import TOKEN
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.exports import contents
from tests.support.runs.recipes import merged, tiny_lora, write_recipe

LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora, rslora, head in full": {"lora": {"use_dora": True, "use_rslora": True, "modules_to_save": ["lm_head"]}},
    "embeddings adapted": {"lora": {"target_modules": ["embed_tokens", "v_proj"]}},
    "ranks and scales by pattern": {"lora": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.mlp.*": 3.5}}},
    "a parameter": {"lora": {"target_modules": ["v_proj"], "target_parameters": ["mlp.down_proj.weight"]}},
    "qlora": {"quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}},
}
# Each engine shards a quantised base in its own number format.
SHARDED: dict[str, dict[str, Any]] = {
    name: {
        "quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype},
        "training": {"mixed_precision": precision},
    }
    for name, dtype, precision in (("fsdp2", "float32", "no"), ("zero3", "bfloat16", "bf16"))
}


def write(folder: Path, base: Path, *changes: dict[str, Any], **sections: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = tiny_lora(base, write_chats(folder / "chats.jsonl", LENGTHS), output_dir=str(folder / "run"))
    steps = {"training": {"max_steps": 6}, "eval_steps": 6}
    return write_recipe(folder, merged(content, steps, *changes, sections))


def evals(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "eval"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """The folder of a recipe that was trained; its run has an adapter."""
    recipe = write(tmp_path_factory.mktemp("first"), base)
    assert main([str(recipe)]) == 0
    return recipe.parent


def from_adapter(folder: Path, base: Path, first: Path, *changes: dict[str, Any], **sections: Any) -> Path:
    return write(folder, base, {"model": {"adapter": str(first / "run" / "adapter")}}, *changes, **sections)


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_it_begins_where_the_earlier_run_ended(
    tmp_path: Path, base: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = write(tmp_path / "first", base, METHODS[method])
    assert main([str(earlier)]) == 0
    recipe = from_adapter(tmp_path / "second", base, tmp_path / "first", METHODS[method])
    capsys.readouterr()
    assert main([str(recipe)]) == 0
    ended, began = evals(tmp_path / "first" / "run"), evals(tmp_path / "second" / "run")
    assert began[0] == pytest.approx(ended[-1], rel=1e-5)
    assert abs(ended[0] - ended[-1]) > 1e-2, "else it would prove little"
    adapter = tmp_path / "first" / "run" / "adapter"
    receipt = json.loads((tmp_path / "second" / "run" / "receipt.json").read_text())["adapter"]
    assert receipt["name"] == str(adapter)
    assert f"training starts from {adapter} (" in (said := capsys.readouterr().out)
    assert receipt["sha256"][:12] in said
    assert "it was made for" not in said


@pytest.mark.slow
def test_its_optimizer_is_fresh(tmp_path: Path, base: Path, first: Path) -> None:
    """One step of AdamW from nothing moves every weight with a gradient by the learning rate: m / sqrt(v) is 1."""
    recipe = from_adapter(tmp_path, base, first, training={"max_steps": 1, "learning_rate": 1e-4, "warmup_steps": 0})
    assert main([str(recipe), "training.lr_scheduler_type=constant"]) == 0
    before = load_file(first / "run" / "adapter" / "adapter_model.safetensors")
    after = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert moved.max() < 1.01e-4
    assert (moved > 0.98e-4).float().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3", "hsdp"])
def test_every_strategy_begins_alike(strategy: str, tmp_path: Path, base: Path, first: Path) -> None:
    skip_where_missing(strategy)
    ranks = 4 if strategy == "hsdp" else 2
    gently = {"learning_rate": 1e-3}  # at 1e-2 AdamW blows rounding up
    recipe = from_adapter(tmp_path, base, first, training=gently)
    words = [f"accelerate_config={strategy if strategy != 'hsdp' else hsdp(tmp_path)}"]
    assert launch([recipe], ranks=ranks, words=words) == [0]
    assert evals(tmp_path / "run")[0] == pytest.approx(evals(first / "run")[-1], rel=1e-5)
    alone = from_adapter(tmp_path / "alone", base, first, training=gently)
    assert main([str(alone)]) == 0
    assert evals(tmp_path / "run")[-1] == pytest.approx(evals(tmp_path / "alone" / "run")[-1], rel=2e-5)


def hsdp(folder: Path) -> str:
    from tests.support.runs.curve_table import config_of

    return config_of("hsdp", folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARDED)
def test_over_a_quantised_base_that_is_sharded(strategy: str, tmp_path: Path, base: Path) -> None:
    skip_where_missing(strategy)
    method = SHARDED[strategy]
    earlier = write(tmp_path / "first", base, method)
    recipes = [earlier, from_adapter(tmp_path / "second", base, tmp_path / "first", method)]
    assert launch(recipes, ranks=2, words=[f"accelerate_config={strategy}"]) == [0, 0]
    ended, began = evals(tmp_path / "first" / "run"), evals(tmp_path / "second" / "run")
    assert began[0] == pytest.approx(ended[-1], rel=1e-5)


@pytest.mark.thorough
def test_an_adapter_that_plain_peft_saved(tmp_path: Path, base: Path) -> None:
    """Another tool's: half precision, its layers named by peft, an alpha of its own; the loss is plain peft's."""
    torch.manual_seed(3)
    config = LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3).copy_(parameter.bfloat16())
    model.save_pretrained(str(tmp_path / "theirs"))
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    lora = {"r": 2, "lora_alpha": 5, "target_modules": ["down_proj", "q_proj"]}
    recipe = write(tmp_path, base, {"model": {"adapter": str(tmp_path / "theirs")}, "lora": lora})
    assert main([str(recipe), "training.learning_rate=1e-7", "data.packing=false"]) == 0
    start = load_file(file)
    after = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert start.keys() == after.keys()
    assert all((after[name] - start[name].float()).abs().max() < 1e-5 for name in start)


@pytest.mark.slow
def test_resumed_it_needs_the_same_adapter_and_begins_only_once(
    tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(first / "run" / "adapter", tmp_path / "first" / "run" / "adapter")
    recipe = from_adapter(tmp_path, base, tmp_path / "first", save_steps=2, save_total_limit=9)
    assert main([str(recipe)]) == 0
    run = tmp_path / "run"
    whole = contents(run / "adapter")
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    state = json.loads((run / "run_state.json").read_text())
    (run / "run_state.json").write_text(json.dumps(state | {"state": "stopped", "step": 2}))
    assert main([str(recipe)]) == 0
    assert contents(run / "adapter") == whole
    (run / "run_state.json").write_text(json.dumps(state | {"state": "stopped"}))
    file = tmp_path / "first" / "run" / "adapter" / "adapter_model.safetensors"
    save_file({name: value * 2 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    assert main([str(recipe)]) == 2
    assert "adapter fingerprint: " in capsys.readouterr().err
    shutil.rmtree(tmp_path / "first" / "run")
    assert cli(["chat", str(run), "--prompt", "hi", "--max-new-tokens", "2"]) == 0, "the run is over"


@pytest.mark.slow
def test_card_merge_and_plan_name_it(
    tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = from_adapter(tmp_path, base, first)
    assert main([str(recipe)]) == 0
    capsys.readouterr()
    assert cli(["merge", str(tmp_path / "run"), "--verify", "0"]) == 0
    assert f"its training started from the adapter {first / 'run' / 'adapter'}" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "merged" / "merge.json").read_text())["started_from"]
    assert cli(["push", str(tmp_path / "run"), "me/it", "--dry-run"]) == 0
    assert "| started from the adapter | adapter (a local folder) |" in capsys.readouterr().out


@pytest.mark.slow
def test_from_the_hub(tmp_path: Path, base: Path, first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # read once, at import
    with running_hub() as hub:
        published(hub, first)
        recipe = write(tmp_path, base, {"model": {"adapter": "me/adapter", "adapter_revision": "v1"}})

        def train(*words: str) -> tuple[int, str]:
            more = {"OMP_NUM_THREADS": "1"}
            done = run_python(hub, ["finetune/train.py", str(recipe), *words], tmp_path, **more)
            return done.returncode, done.stderr

        assert train()[0] == 0
        assert evals(tmp_path / "run")[0] == pytest.approx(evals(first / "run")[-1], rel=1e-5)
        facts = json.loads((tmp_path / "run" / "receipt.json").read_text())["adapter"]
        assert (facts["name"], facts["revision"]) == ("me/adapter", "v1")
        code, said = train("model.adapter=me/nothing", "training.resume=never")
        assert (code, "adapter_config.json of me/nothing could not be loaded" in said) == (4, True)
        code, said = train("model.adapter_revision=main", "training.resume=never")
        assert (code, "me/adapter: has no adapter_model.safetensors; save" in said) == (2, True)
    assert not (tmp_path / "run.previous-1").exists(), "refused before the folder is touched"


def published(hub: Hub, first: Path) -> None:
    """The adapter on branch v1; on main its configuration alone."""
    api, adapter = HfApi(endpoint=hub.url, token=TOKEN), first / "run" / "adapter"
    api.create_repo("me/adapter")
    api.upload_file(
        repo_id="me/adapter", path_or_fileobj=adapter / "adapter_config.json", path_in_repo="adapter_config.json"
    )
    api.create_branch("me/adapter", branch="v1")
    api.upload_folder(repo_id="me/adapter", folder_path=adapter, revision="v1", ignore_patterns="README.md")


def changed(**values: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda adapter: (adapter / name).unlink()


def pickled(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


REFUSED_BY_CHECK: list[tuple[Callable[[Path], object], list[str], str]] = [
    (lambda _: None, ["lora.r=8"], "lora.r is 8 and the adapter's 4; write lora: {r: 4}"),
    (
        changed(lora_alpha=7, use_dora=True),
        [],
        "lora.lora_alpha is 32 and the adapter's 7, lora.use_dora is false and the adapter's true; write lora: "
        "{lora_alpha: 7, use_dora: true}",
    ),
    (lambda _: None, ["lora.use_rslora=true"], "lora.use_rslora is true and the adapter's false"),
    (lambda _: None, ["lora.target_modules=[q_proj]"], "lora.target_modules is [q_proj] and the adapter's [down_proj,"),
    (lambda _: None, ["lora.modules_to_save=[lm_head]"], "lora.modules_to_save is [lm_head] and the adapter's []"),
    (changed(init_lora_weights="corda"), [], "has init_lora_weights: corda, which is not offered here; merge it"),
    (
        changed(rank_pattern={"q_proj": 2}),
        [],
        "lora.rank_pattern is {} and the adapter's {q_proj: 2}; write lora",
    ),
    (lambda _: None, ["lora.alpha_pattern={q_proj: 2}"], "lora.alpha_pattern is {q_proj: 2.0} and the adapter's {};"),
    (
        changed(target_parameters=["experts.up"]),
        ["lora.target_parameters=[]"],
        "target_parameters is [] and the adap",
    ),
    (changed(layer_replication=[[0, 1]]), [], "has layer_replication, which is not offered here; merge it"),
    (changed(peft_type="IA3"), [], "is an adapter of kind IA3; name a LoRA adapter"),
    (lambda _: None, ["lora=null"], "all weights are trained, no adapter (lora is null); add lora: {}"),
    (without("adapter_config.json"), [], "has no adapter_config.json; name the folder of an adapter that peft saved"),
    (without("adapter_model.safetensors"), [], "has no adapter_model.safetensors; save the adapter once more"),
    (pickled, [], "has adapter_model.bin, a pickle, which is never read; save the adapter once more"),
    (lambda adapter: shutil.rmtree(adapter), [], "no such folder; name a folder with adapter_config.json, or owner/"),
    (lambda adapter: (adapter / "adapter_config.json").write_text("[]"), [], "adapter_config.json is not JSON of an"),
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("spoil", "words", "said"), REFUSED_BY_CHECK)
def test_check_says_what_does_not_fit(
    spoil: Callable[[Path], object],
    words: list[str],
    said: str,
    tmp_path: Path,
    base: Path,
    first: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(first / "run" / "adapter", tmp_path / "first" / "run" / "adapter")
    recipe = from_adapter(tmp_path, base, tmp_path / "first")
    assert cli(["check", str(recipe)]) == 0
    spoil(tmp_path / "first" / "run" / "adapter")
    capsys.readouterr()
    assert cli(["check", str(recipe), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len([line for line in error.splitlines() if "adapter: " in line]) == 1
    assert main([str(recipe), *words]) == 2
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_run_is_answered_with_its_adapter(
    tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(tmp_path, base, {"model": {"adapter": str(first / "run")}})
    assert cli(["check", str(recipe)]) == 2
    assert f"has no adapter_config.json; name {first / 'run' / 'adapter'}" in capsys.readouterr().err


def other_shape(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, file, metadata={"format": "pt"})


def not_finite(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file(tensors | {name: tensors[name] * torch.nan}, file, metadata={"format": "pt"})


def torn(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


REFUSED_BY_TRAINING: list[tuple[Callable[[Path], object], list[str], str]] = [
    (other_shape, [], "lora_A.weight is (4, 63) there and (4, 64) in the model (1 of its tensors do not fit)"),
    (
        lambda _: None,
        ["lora.target_modules=.*q_proj"],
        "down_proj.lora_A.weight, which is not trained (24 of its tensors",
    ),
    (torn, [], "adapter_model.safetensors: has 100 bytes"),
    (not_finite, [], "not finite: base_model.model"),
]


@pytest.mark.parametrize(("spoil", "words", "said"), REFUSED_BY_TRAINING)
def test_training_says_what_does_not_fit_the_model(
    spoil: Callable[[Path], object],
    words: list[str],
    said: str,
    tmp_path: Path,
    base: Path,
    first: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(first / "run" / "adapter", tmp_path / "first" / "run" / "adapter")
    spoil(tmp_path / "first" / "run" / "adapter")
    recipe = from_adapter(tmp_path, base, tmp_path / "first")
    assert main([str(recipe), *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"model.adapter: {tmp_path / 'first' / 'run' / 'adapter'}: ")
    assert said in error
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.slow
def test_an_adapter_of_another_base_is_told(
    tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(first / "run" / "adapter", tmp_path / "first" / "run" / "adapter")
    changed(base_model_name_or_path="someone/else")(tmp_path / "first" / "run" / "adapter")
    add_metadata(tmp_path / "first" / "run" / "adapter" / "adapter_model.safetensors", {BASE_CONTENT: "0" * 32})
    assert main([str(from_adapter(tmp_path, base, tmp_path / "first"))]) == 0
    assert f"it was made for a base with the content 000000000000, {base} has " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("someone/else", None, "it was made for someone/else, this recipe has {base}"),
        ("{base}", None, None),
        ("someone/else", "{content}", None),  # the same model under another name
        ("{base}", "0" * 32, "it was made for a base with the content 000000000000, {base} has {content:.12}"),
    ],
)
def test_when_another_base_is_told(
    tmp_path: Path, base: Path, name: str, content: str | None, told: str | None
) -> None:
    recipe = load_recipe(write(tmp_path, base)).recipe
    words = {"base": base, "content": content_of(base)}
    adapter = StartAdapter("a", None, tmp_path, "5" * 64, name.format(**words), content and content.format(**words), {})
    line = adapter.note(recipe)
    assert ("it was made for" in line) == (told is not None)
    assert told is None or told.format(**words) in line


def test_rehearsal_and_plan_need_no_adapter(
    tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.recipe.loader import load_recipe
    from finetune.recipe.strategy import read_strategy
    from finetune.rehearse.changes import changes
    from finetune.rehearse.shrink import Shrunk

    recipe = write(tmp_path, base, {"model": {"adapter": str(tmp_path / "later" / "adapter")}})
    loaded = load_recipe(recipe).recipe
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "key_value_heads": 2, "head_dim": 16}
    small = Shrunk(tmp_path, "Llama", "here", sizes, sizes, 1, 512)
    made = changes(loaded, read_strategy("single"), small, processes=1, folder=tmp_path)
    assert [change.note for change in made if "model.adapter" in change.settings] == [
        f"model.adapter: new adapters instead of {tmp_path / 'later' / 'adapter'}, which fits the real model alone"
    ]
