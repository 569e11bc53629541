"""What is not finite, and what changed nothing, is never saved, exported, pushed or called finished."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import NotFinite
from finetune.run_folder.checkpoint import (
    examine,
    newest_valid,
    self_hash,
    sha256_of,
    step_folder,
    write_checkpoint,
)
from finetune.train import main
from finetune.training import loop, samples, worst_step
from tests.support.hub import running_hub
from tests.support.hub.processes import run_python
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.recipes import tiny_lora, write_recipe

Spoil = Callable[[Any, int], None]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", [30, 45, 60, 80, 25, 100, 40, 55])


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path, chats: Path) -> Path:
    steps: dict[str, Any] = {"training": {"max_steps": 4}, "eval_steps": 100, "save_steps": 2}
    return write_recipe(tmp_path, tiny_lora(tiny_llama, chats, **steps, output_dir=str(tmp_path / "run")))


def after_each_step(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """`spoil(model, finished steps)` after each update of the training; the worst step is not one of them."""
    original, count = loop.optimizer_step, [0]
    assert worst_step.optimizer_step is original  # loaded here, so that it keeps the real one

    def spoiled(parts: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(parts, *args, **kwargs)
        count[0] += 1
        spoil(parts.model, count[0])
        return result

    monkeypatch.setattr(loop, "optimizer_step", spoiled)


def set_nan(at: int) -> Spoil:
    def spoil(model: Any, step: int) -> None:
        if step == at:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            trained[-1].data.view(-1)[3] = math.nan

    return spoil


def state_of(run: Path) -> str:
    return str(json.loads((run / "run_state.json").read_text())["state"])


def checkpoints_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*"))


class TestNotFinite:
    @pytest.mark.thorough
    def test_of_the_last_update_the_last_good_state_resumes(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run, words = tmp_path / "run", [str(recipe), "data.eval=null"]
        with monkeypatch.context() as fault:
            after_each_step(fault, set_nan(4))
            assert main(words) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("step 4: not finite: 1 of ")
        assert "Traceback" not in errors
        assert (state_of(run), checkpoints_of(run), (run / "adapter").exists()) == ("failed", ["step-00000002"], False)
        assert main(words) == 0
        assert (state_of(run), (run / "adapter").is_dir()) == ("finished", True)

    @pytest.mark.slow
    def test_of_the_only_checkpoint_s_step_no_checkpoint_is_left_and_the_run_starts_over(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, words = tmp_path / "run", [str(recipe), "data.eval=null", "save_steps=1"]
        with monkeypatch.context() as fault:
            after_each_step(fault, set_nan(1))
            assert main(words) == 2
        assert checkpoints_of(run) == []
        assert main(words) == 0
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4]

    @pytest.mark.thorough
    def test_with_one_checkpoint_kept_the_good_one_is_not_pruned(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after_each_step(monkeypatch, set_nan(3))
        assert main([str(recipe), "data.eval=null", "save_steps=1", "save_total_limit=1"]) == 2
        assert checkpoints_of(tmp_path / "run") == ["step-00000002"]

    def test_of_an_evaluation(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Where only evaluation overflows: the training's own losses and weights stay finite."""
        run, words = tmp_path / "run", [str(recipe), "eval_steps=4"]
        with monkeypatch.context() as fault:
            after_each_step(fault, lambda model, step: model.register_forward_hook(_nan_outside_training))
            assert main(words) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("step 4: the held-out loss is nan")
        assert (state_of(run), checkpoints_of(run), (run / "adapter").exists()) == ("failed", ["step-00000002"], False)
        assert [line["step"] for line in _evaluations(run)] == [0]
        assert main(words) == 0
        assert [line["step"] for line in _evaluations(run)] == [0, 4]

    def test_of_the_first_look(
        self, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(
            samples, "evaluate_run", lambda *_: _raise(NotFinite("the held-out loss is nan: not finite"))
        )
        assert main([str(recipe)]) == 2
        assert "the held-out loss is nan" in capsys.readouterr().err
        assert not (tmp_path / "run" / "checkpoints").exists()

    def test_of_the_optimizer_s_state(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A second moment of infinity leaves weights finite, and still for ever; no resume could take it."""
        original = torch.optim.AdamW.step

        def spoiled(self: torch.optim.AdamW, closure: None = None) -> None:
            original(self, closure)
            next(iter(self.state.values()))["exp_avg_sq"].view(-1)[0] = math.inf

        monkeypatch.setattr(torch.optim.AdamW, "step", spoiled)
        assert main([str(recipe), "data.eval=null"]) == 2
        assert "exp_avg_sq" in capsys.readouterr().err
        assert not (tmp_path / "run" / "adapter").exists()

    @pytest.mark.thorough
    def test_of_an_export_whose_number_format_is_too_narrow(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def spoil(model: Any, step: int) -> None:
            next(model.parameters()).data[400, 0] = 1e6  # float16 ends at 65,504; a token that no chat has

        after_each_step(monkeypatch, spoil)
        words = ["lora=null", "model.dtype=float16", "data.eval=null", "training.learning_rate=1e-4"]
        assert main([str(recipe), *words]) == 2
        assert "export: not finite in float16: 1 of the weights, first model.embed_tokens.weight" in (
            capsys.readouterr().err
        )
        run = tmp_path / "run"
        assert (state_of(run), (run / "model").exists()) == ("failed", False)

    @pytest.mark.slow
    def test_a_checkpoint_of_an_earlier_release_is_passed_over_and_does_not_displace_a_good_one(
        self, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run, words = tmp_path / "run", [str(recipe), "data.eval=null"]
        assert main(words) == 0
        as_earlier_release_wrote(step_folder(run, 4))
        state = json.loads((run / "run_state.json").read_text()) | {"state": "failed"}
        (run / "run_state.json").write_text(json.dumps(state))
        assert str(examine(step_folder(run, 4))).startswith("not finite: base_model")
        newest, damaged = newest_valid(run)
        assert newest is not None
        assert (newest.step, len(damaged)) == (2, 1)
        capsys.readouterr()
        assert main(words) == 0
        assert "damaged, not used: not finite" in capsys.readouterr().err
        assert isinstance(examine(step_folder(run, 4)), type(newest)), "written again"

    def test_a_bad_checkpoint_takes_no_good_one_s_place(self, tmp_path: Path) -> None:
        for step in (1, 2):
            write_checkpoint(tmp_path, step, {"model": {"w": torch.ones(3)}}, {}, keep=9)
        as_earlier_release_wrote(step_folder(tmp_path, 2))
        write_checkpoint(tmp_path, 3, {"model": {"w": torch.ones(3)}}, {}, keep=2)
        assert checkpoints_of(tmp_path) == ["step-00000001", "step-00000003"]


class TestNothingTrained:
    @pytest.mark.thorough
    @pytest.mark.parametrize("words", [["training.learning_rate=1e-60"], ["lora=null", "training.learning_rate=1e-15"]])
    def test_a_rate_too_small_for_any_weight(
        self, words: list[str], recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = tmp_path / "run"
        for _ in range(2):  # and the same command again
            assert main([str(recipe), *words]) == 2
            assert "training: its steps changed no bit of the " in capsys.readouterr().err
            assert state_of(run) == "failed"
            assert not (run / "adapter").exists()
            assert not (run / "model").exists()

    @pytest.mark.thorough
    def test_frozen_by_a_fault(self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        original = torch.optim.AdamW.step

        def without_effect(self: torch.optim.AdamW, closure: None = None) -> None:
            before = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]
            original(self, closure)
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                parameter.data.copy_(before.pop(0))

        monkeypatch.setattr(torch.optim.AdamW, "step", without_effect)
        assert main([str(recipe)]) == 2
        assert not (tmp_path / "run" / "adapter").exists()

    def test_a_warmup_longer_than_the_run(
        self, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([str(recipe), "training.warmup_steps=5"]) == 2
        assert "a warmup of 5 steps is longer than the run of 4" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    @pytest.mark.thorough
    @pytest.mark.sample(1)
    @pytest.mark.parametrize(("rate", "pushed"), [(1e-60, []), (1e-2, [2, 4])])
    def test_checkpoints_go_to_the_storage_once_something_has_changed(
        self, rate: float, pushed: list[int], recipe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[int] = []
        monkeypatch.setattr("finetune.storage.mirror.Mirror.push", lambda self, step, best: steps.append(step))
        words = [f"run.storage=file://{recipe.parent}/store", f"training.learning_rate={rate}"]
        assert main([str(recipe), *words]) == (0 if pushed else 2)
        assert steps == pushed

    @pytest.mark.thorough
    def test_the_first_and_the_last_step_train(self, recipe: Path, tmp_path: Path) -> None:
        """One step, as many a first run has: with transformers' warmup its rate was 0."""
        assert main([str(recipe), "training.max_steps=1"]) == 0
        trained = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        moved = {name: bool(tensor.count_nonzero()) for name, tensor in trained.items() if "lora_B" in name}
        assert len(moved) == 14
        assert all(moved.values())
        unchanged = json.loads((tmp_path / "run" / "receipt.json").read_text())["change"]["unchanged_tensors"]
        assert len(unchanged) == 14, "in a first step, B is 0 and A has no gradient"
        assert all("lora_A" in name for name in unchanged)

    @pytest.mark.thorough
    def test_single_tensors_are_named(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        original, hooked = loop.optimizer_step, []

        def without_one(parts: Any, *args: Any, **kwargs: Any) -> Any:
            if not hooked:
                last = [parameter for parameter in parts.model.parameters() if parameter.requires_grad][-1]
                hooked.append(last.register_hook(torch.zeros_like))
            return original(parts, *args, **kwargs)

        monkeypatch.setattr(loop, "optimizer_step", without_one)
        assert main([str(recipe)]) == 0
        assert "unchanged by training: 2 of 28 trained tensors: base_model" in capsys.readouterr().out
        unchanged = json.loads((tmp_path / "run" / "receipt.json").read_text())["change"]["unchanged_tensors"]
        assert [name.rpartition("layers.")[2] for name in unchanged] == [
            "1.mlp.down_proj.lora_A.default.weight",  # whose gradient is 0 while B is
            "1.mlp.down_proj.lora_B.default.weight",
        ]

    @pytest.mark.thorough
    def test_a_resumed_run_knows_its_start(
        self, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with monkeypatch.context() as fault:
            after_each_step(fault, lambda model, step: _raise(KeyboardInterrupt()) if step == 3 else None)
            assert main([str(recipe)]) == 130
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
        assert main([str(recipe)]) == 0, "its first two steps trained"
        assert "unchanged" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero3"])
def test_under_several_ranks(strategy: str, recipe: Path, tmp_path: Path) -> None:
    """All ranks end with exit code 2: at weights that overflow, and at those that nothing moves."""
    content = json.loads(recipe.read_text()) | {"accelerate_config": strategy}
    recipes = []
    for name, rate, steps in (("overflow", 1e300, 1), ("unmoved", 1e-60, 2), ("full", 1e-15, 2), ("right", 1e-2, 2)):
        training = content["training"] | {"learning_rate": rate, "max_steps": steps, "warmup_steps": 0}
        lora = None if name == "full" else content["lora"]
        file = tmp_path / f"{name}.yaml"
        folder = {"output_dir": str(tmp_path / name)}
        file.write_text(json.dumps(content | {"training": training, "lora": lora} | folder))
        recipes.append(file)
    assert launch(recipes, ranks=2) == [2, 2, 2, 0]
    states = [json.loads((tmp_path / file.stem / "run_state.json").read_text()) for file in recipes]
    assert [state["state"] for state in states] == ["failed"] * 3 + ["finished"]
    assert "not finite" in states[0]["error"]
    assert "changed no bit" in states[1]["error"]
    assert "changed no bit" in states[2]["error"]
    assert checkpoints_of(tmp_path / "overflow") == []
    exported = [name for name in ("adapter", "model") for file in recipes if (tmp_path / file.stem / name).exists()]
    assert exported == ["adapter"]
    unchanged = json.loads((tmp_path / "right" / "receipt.json").read_text())["change"]["unchanged_tensors"]
    assert unchanged == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [["training.learning_rate=1e-60"], ["training.learning_rate=1e300"]])
def test_nothing_is_pushed(words: list[str], tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl", [40] * 24)
    path = tmp_path / "pushing.yaml"
    path.write_text(
        f"model: {{name_or_path: {base}, dtype: float32}}\n"
        f"data: {{train: [{{path: json, data_files: {tmp_path}/chats.jsonl}}]}}\n"
        "training: {max_steps: 1, global_batch_size: 4, mixed_precision: 'no'}\n"
        "samples: {count: 0}\n"
        f"output_dir: {tmp_path}/run\n"
        "hub: {repo_id: me/devils, push: true, checkpoints: checkpoints}\n"
    )
    with running_hub() as hub:
        process = run_python(hub, ["finetune/train.py", str(path), *words], tmp_path)
        assert process.returncode == 2
        assert "Traceback" not in process.stderr
        assert "commit" not in hub.calls()
        assert "whoami" in hub.calls()


def as_earlier_release_wrote(folder: Path) -> None:
    """Its first tensor not finite, in a manifest that says nothing of that; hashes are right."""
    file = sorted(folder.glob("model-*.safetensors"))[0]
    tensors = load_file(file)
    tensors[min(tensors)].view(-1)[0] = math.nan
    save_file(tensors, file)
    seal(folder, finite=False)


def seal(folder: Path, *, finite: bool = True) -> None:
    """The manifest made anew for files that were changed."""
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["sha256"]
    if not finite:
        del manifest["finite"]
    for name in manifest["files"]:
        manifest["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest | {"sha256": self_hash(manifest)}))


def _nan_outside_training(module: Any, arguments: Any, output: Any) -> Any:
    return output if module.training else output * math.nan


def _evaluations(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "eval"]


def _raise(error: BaseException) -> Any:
    raise error
