"""`finetune rehearse`: what it shrinks, what it changes and says, and that it sees what is wrong."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.cli.main import main
from finetune.data.chat import Chat, Judged, Pair
from finetune.data.rows import RowReader, check_rows
from finetune.data.sources import resolve
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.launch.watched_job import StepFailed, TrainingJob, kill_all, wait_until
from finetune.model.known_configs import CONFIGS, HUB_NAMES, full_config
from finetune.model.optimizer import Schedule
from finetune.probe.small_model import LARGEST, shrunken_config
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Data, DataSet, Recipe
from finetune.recipe.strategy import CONFIG_FOLDER, read_strategy
from finetune.rehearse import rehearsal as rehearsals
from finetune.rehearse.changes import (
    LONGEST_ROW,
    RESUMES_ON_A_GPU,
    SAMPLE_CHAT,
    SAVED_AFTER,
    STEPS,
    changes,
    layers_of,
    overrides,
    processes_of,
)
from finetune.rehearse.load_back import load_back
from finetune.rehearse.rehearsal import Checklist, exported, rehearse, resume_tolerance, same_curve, sharding
from finetune.rehearse.shrink import Shrunk, shrink_model
from finetune.run_folder.checkpoint import write_checkpoint
from finetune.run_folder.save_restore import export_adapter
from tests.support.models.tiny import save_tiny, tiny_model, tiny_tokenizer, write_chats
from tests.support.runs.preferences import preference_recipe
from tests.support.runs.recipe_results import LONGEST_SECONDS, RESULTS, recipes, stands

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml") if path.stem != "cpu_2proc")
# Of a rehearsal: strategy, ranks asked for, ranks; two stages or more of each pipeline, all as long.
PROCESSES = [
    ("single", 4, 1),
    ("zero2", 2, 2),
    ("hsdp", 2, 4),
    ("gpipe", 3, 3),
    ("1f1b_ddp2", 2, 4),
    ("1f1b_ddp2", 5, 6),
]
# Of the models themselves, as their makers state them.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-4b": 4_205_751_296,  # text
    "qwen3.5-9b": 8_953_803_264,  # text
    "qwen3.5-27b": 26_895_998_464,  # text
    "gemma-3-27b": 27_009_346_304,  # text
    "gemma-4-31b": 30_697_345_280,
    "phi-4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-20b-bf16": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-120b-bf16": 116_829_156_672,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "smollm3-3b": 3_075_098_624,
    "glm-4-9b-0414": 9_400_279_040,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
# Of the text part, as their makers state it in billions; where they state a whole model's, without its other towers.
BILLIONS = {
    "gemma-3-1b": 1.000,  # 302 million of embeddings and 698
    "gemma-3-4b": 3.88,  # 675 and 3,209
    "gemma-3-12b": 11.77,  # 1,012 and 10,759
    "gemma-4-e2b": 4.65,  # 5.1 with 0.15 for images and 0.3 for sound
    "gemma-4-e4b": 7.5,
    "gemma-4-26b-a4b": 25.2,
    "llama-4-scout-17b-16e": 107.8,  # 109, of which its vision tower has 0.9
    "qwen3.5-0.8b": 0.75,
    "qwen3.5-35b-a3b": 34.66,  # 35.1, of which its vision tower has 0.45
    "ministral-3-3b": 3.4,
    "ministral-3-8b": 8.4,
    "ministral-3-14b": 13.5,
}
QUICK = {"data": {"train": [{"path": "json", "data_files": "data/sample_chat.jsonl"}]}}


def parameters_of(config: dict[str, Any]) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


class TestShrink:
    def test_every_configuration_is_known_by_a_name(self) -> None:
        assert {path.stem for path in CONFIGS.glob("*.json")} == set(HUB_NAMES) == {*PARAMETERS, *BILLIONS}

    @pytest.mark.sample(2, thorough=8)
    @pytest.mark.parametrize("stem", PARAMETERS)
    def test_configurations_are_the_models(self, stem: str) -> None:
        config, source = full_config(f"{HUB_NAMES[stem][0]}-Instruct")
        assert source == f"finetune/model/configs/{stem}.json"
        assert parameters_of(config) == PARAMETERS[stem]

    @pytest.mark.sample(3, thorough=11)
    @pytest.mark.parametrize("stem", BILLIONS)
    def test_text_parts_have_the_size_that_is_stated(self, stem: str) -> None:
        config, _ = full_config(HUB_NAMES[stem][0])
        assert parameters_of(config) / 1e9 == pytest.approx(BILLIONS[stem], rel=0.011)

    @pytest.mark.parametrize("stem", [*PARAMETERS, *BILLIONS])
    def test_only_sizes_shrink(self, stem: str) -> None:
        full, _ = full_config(HUB_NAMES[stem][0])
        small = shrunken_config(full, 1024)
        assert parameters_of(small) < LARGEST
        for config in (full, small):  # queries to a key-value head, width to all heads
            config["ratio"] = config["num_attention_heads"] / config["num_key_value_heads"]
        assert small["ratio"] == full["ratio"]
        ffn = "intermediate_size" if "intermediate_size" in full else "moe_intermediate_size"
        assert small["hidden_size"] % 64 == small[ffn] % 64 == 0
        for key in ("model_type", "tie_word_embeddings", "rope_theta", "rope_scaling", "sliding_window", "hidden_act"):
            assert small.get(key) == full.get(key)

    def test_a_folder_is_shrunk_as_well(self, tmp_path: Path) -> None:
        small = shrink_model(str(save_tiny(tmp_path / "m", "qwen3")), "main", sample_data(), tmp_path / "small")
        assert (small.architecture, small.full["layers"], small.small["layers"]) == ("Qwen3ForCausalLM", 2, 2)

    def test_both_kinds_of_layers_stay(self) -> None:
        config = {**full_config("Qwen/Qwen3-8B")[0], "num_hidden_layers": 6}
        config["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
        assert shrunken_config(config, 1024)["layer_types"] == ["sliding_attention", "full_attention"]

    def test_the_same_each_time_and_nothing_drawn(self, tmp_path: Path) -> None:
        before = torch.random.get_rng_state()
        for name in ("one", "two"):
            shrink_model("meta-llama/Llama-3.2-1B", "main", sample_data(), tmp_path / name)
        one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("config", "text"),
        [
            (None, "not on this machine, and HF_HUB_OFFLINE is set; .* a local folder .* meta-llama/Llama-3.1-8B"),
            (
                {"model_type": "bamba", "num_hidden_layers": 2},
                "cannot be made small: .* no num_attention_heads; .*model.name_or_path=FOLDER",
            ),
        ],
    )
    def test_what_is_not_known(
        self, config: dict[str, Any] | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        name = "nobody/knows-it"
        if config is not None:
            name = str(tmp_path)
            (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(EnvironmentMismatch, match=text):
            shrink_model(name, "main", sample_data(), tmp_path / "small")


def sample_data() -> Data:
    return Data.model_validate({"train": [{"path": "json", "data_files": str(ROOT / "data" / "sample_chat.jsonl")}]})


def write_recipe(folder: Path, model: str, text: str = "") -> Path:
    chats = write_chats(folder / "chats.jsonl", [40 + 7 * index for index in range(12)])
    file = folder / "recipe.yaml"
    file.write_text(
        f"model: {{name_or_path: {model}}}\n"
        f"data: {{train: [{{path: json, data_files: {chats}}}], eval: {{fraction: 0.2}}, max_length: 400}}\n{text}"
    )
    return file


SHRUNK = Shrunk(
    Path("small"), "X", "x.json", {"layers": 80, "hidden_size": 8192}, {"layers": 2, "hidden_size": 64}, 1, 2
)


def rehearsed(file: Path, *words: str) -> tuple[Recipe, Recipe, list[str]]:
    """The recipe, what is rehearsed of it, and what is said to differ."""
    before = load_recipe(file, words).recipe
    strategy = read_strategy(before.accelerate_config)
    recipe_changes = changes(before, strategy, SHRUNK, processes=processes_of(strategy, 2), folder=file.parent)
    after = load_recipe(file, [*words, *overrides(recipe_changes)]).recipe
    return before, after, [change.note for change in recipe_changes if change.note]


class TestChanges:
    # Bookkeeping: how often is reported and kept, which samples are written.
    UNTOLD = (
        "output_dir",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "save_total_limit",
        "measure_phases",
        "samples",
        "timeout_seconds",
    )

    @pytest.mark.parametrize("path", recipes().values(), ids=lambda path: path.stem)
    def test_every_change_of_a_recipe_has_a_note(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        copy = Path(shutil.copy(path, tmp_path))
        before, after, notes = rehearsed(copy)
        sections = {line.partition(":")[0] for line in notes} | {"device"}
        aliases = {"budget": "device", "model.name_or_path": "model", "model.revision": "model"}
        for key, value in flat(after.model_dump()).items():
            if value != flat(before.model_dump()).get(key) and not key.startswith(self.UNTOLD):
                place = aliases.get(key, aliases.get(key.partition(".")[0], key))
                assert any(place.startswith(section) for section in sections), f"{key} changed silently"

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_strategy_and_method_stay(self, strategy: str, tmp_path: Path) -> None:
        file = write_recipe(tmp_path, "meta-llama/Llama-3.1-8B")
        before, after, _ = rehearsed(file, f"accelerate_config={strategy}", "quantization={load_in_4bit: true}")
        one, other = read_strategy(before.accelerate_config), read_strategy(after.accelerate_config)
        assert (one.kind, one.zero_stage, one.offloaded) == (other.kind, other.zero_stage, other.offloaded)
        assert (before.lora, before.quantization) == (after.lora, after.quantization)
        assert after.training.activation_checkpointing == before.training.activation_checkpointing
        assert after.data.packing == before.data.packing
        assert after.training.max_steps == STEPS

    def test_every_strategy_is_seen(self) -> None:
        assert len(STRATEGIES) == 18

    @pytest.mark.parametrize(("name", "requested", "ranks"), PROCESSES)
    def test_processes(self, name: str, requested: int, ranks: int) -> None:
        assert processes_of(read_strategy(name), requested) == ranks

    @pytest.mark.parametrize(
        ("name", "ranks", "layers"),
        [("ddp", 4, 2), ("gpipe", 2, 2), ("1f1b", 4, 4), ("interleaved_1f1b", 2, 4), ("1f1b_ddp2", 4, 2)],
    )
    def test_every_stage_has_layers(self, name: str, ranks: int, layers: int, tmp_path: Path) -> None:
        assert layers_of(read_strategy(name), ranks) == layers
        small = shrink_model("meta-llama/Llama-3.2-1B", "main", sample_data(), tmp_path / "small", layers=layers)
        assert small.small["layers"] == layers

    @pytest.mark.parametrize(
        ("setting", "text", "key", "value"),
        [
            ("budget.gpus=8", "device: one process on the CPU instead of 8 GPUs over NCCL", "budget.gpus", 0),
            ("data.max_length=4096", f"rows of {LONGEST_ROW} tokens instead of 4,096", "data.max_length", LONGEST_ROW),
            ("data.truncation=drop", "documents are cut, where the recipe says drop", "data.truncation", "right"),
            ("training.optim=paged_adamw_8bit", "adamw_8bit instead of paged", "training.optim", "adamw_8bit"),
            ("training.optim=paged_adamw_32bit", "adamw instead of paged", "training.optim", "adamw"),
            ("training.warmup_steps=100", "warmup_steps: each number of steps is 1", "training.warmup_steps", 1),
            ("model.attention=flash_attention_2", "own kernel, no flash_attention_2", "model.attention", "auto"),
            ("save_total_limit=1", "", "save_total_limit", 2),
            ("training.early_stopping_patience=3", "", "training.load_best_model_at_end", True),
            ("training.load_best_model_at_end=true", "", "training.load_best_model_at_end", True),
            ("training.adam_beta2=0.95", "", "training.adam_beta2", 0.95),
            ("timeout_seconds=5", "", "timeout_seconds", 300),
        ],
    )
    def test_stand_ins(self, setting: str, text: str, key: str, value: Any, tmp_path: Path) -> None:
        _, after, lines = rehearsed(write_recipe(tmp_path, "x"), setting)
        assert not text or any(text in line for line in lines), lines
        assert flat(after.model_dump())[key] == value

    @pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
    def test_fp16_stays(self, strategy: str, tmp_path: Path) -> None:
        given = ["training.mixed_precision=fp16", "model.dtype=float16", f"accelerate_config={strategy}"]
        _, after, _ = rehearsed(write_recipe(tmp_path, "x"), *given)
        assert (after.training.mixed_precision, after.model.dtype) == ("fp16", "float16")

    def test_rows_of_the_hub_have_a_stand_in(self, tmp_path: Path) -> None:
        file = write_recipe(tmp_path, "x")
        _, after, notes = rehearsed(file, "data.train=[{path: someone/chats, weight: 2.0}]")
        assert after.data.train[0].path == "json"
        assert after.data.train[0].weight == 2.0
        assert "data.train: data/sample_chat.jsonl instead of someone/chats" in notes

    def test_a_schedule_shrinks_with_its_steps(self, tmp_path: Path) -> None:
        given = "training.lr_scheduler_kwargs={num_decay_steps: 100, decay_type: cosine}"
        _, after, notes = rehearsed(
            write_recipe(tmp_path, "x"), "training.lr_scheduler_type=warmup_stable_decay", given
        )
        assert after.training.lr_scheduler_kwargs == {"num_decay_steps": 1, "decay_type": "cosine"}
        assert "training: lr_scheduler_kwargs: each number of steps is 1" in notes

    def test_a_shrunken_schedule_has_no_step_at_rate_0(self, tmp_path: Path) -> None:
        given = "training.lr_scheduler_kwargs={num_decay_steps: 100, num_stable_steps: 900}"
        words = ["training.lr_scheduler_type=warmup_stable_decay", "training.warmup_steps=50", given]
        _, after, _ = rehearsed(write_recipe(tmp_path, "x"), *words)
        rate = Schedule(after.training, STEPS).rate  # which refuses rates of 0 at the end
        assert min(rate(step) for step in range(STEPS)) > 0


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {
        key: leaf for name, inner in value.items() for key, leaf in flat(inner, f"{path}.{name}".strip(".")).items()
    }


CURVE = [(step, 2.5 - step / 8, 0.5) for step in range(1, STEPS + 1)]


class TestWhatIsSeen:
    def test_the_same_curve(self) -> None:
        assert same_curve(CURVE, list(CURVE)) == "steps 3 to 4 again: loss and gradient norm bitwise"

    @pytest.mark.parametrize(
        ("deterministic", "compute", "tolerance"),
        [(True, "bfloat16", 0.0), (False, "float32", 1e-4), (False, "bfloat16", 1e-2), (False, "float16", 1e-2)],
    )
    def test_what_a_resume_is_held_to(self, deterministic: bool, compute: str, tolerance: float) -> None:
        assert resume_tolerance({"deterministic": deterministic, "dtypes": {"compute": compute}}) == tolerance

    def test_the_same_curve_to_a_tolerance(self) -> None:
        near = [*CURVE[:-1], (STEPS, 2.0 * 1.00005, 0.5 * 0.99995)]
        said = same_curve(CURVE, near, tolerance=1e-4)
        assert said.startswith("steps 3 to 4 again: loss and gradient norm within 0.0001: ")
        assert "training.deterministic=true" in said
        far = [*CURVE[:-1], (STEPS, 2.0, 0.5 * 0.9998)]
        with pytest.raises(StepFailed, match=r"step 4: .* resumed, further apart than 0\.0001"):
            same_curve(CURVE, far, tolerance=1e-4)
        overflowed = [(step, loss, None) for step, loss, _ in CURVE]
        assert same_curve(overflowed, list(overflowed), tolerance=1e-4)
        with pytest.raises(StepFailed, match="step 1"):
            same_curve(CURVE, overflowed, tolerance=1e-4)

    @pytest.mark.parametrize(("gpus", "deterministic", "told"), [(1, False, True), (1, True, False), (0, False, False)])
    def test_it_is_told_what_a_gpus_resume_promises(
        self, gpus: int, deterministic: bool, told: bool, tmp_path: Path
    ) -> None:
        settings = [f"budget.gpus={gpus}", f"training.deterministic={str(deterministic).lower()}"]
        recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", settings).recipe
        found = changes(recipe, read_strategy("single"), SHRUNK, processes=1, folder=tmp_path)
        assert any(change.note == RESUMES_ON_A_GPU for change in found) == told

    @pytest.mark.parametrize(
        ("name", "count"), [("smollm3_3b_full_apo_fsdp2_2x80gb", 2), ("smollm2_1.7b_lora_kto_1x8gb", 1)]
    )
    def test_preferences_of_the_hub_become_the_sample_chats(self, name: str, count: int, tmp_path: Path) -> None:
        recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe
        found = changes(recipe, read_strategy("single"), SHRUNK, processes=1, folder=tmp_path)
        settings = {key: value for change in found for key, value in change.settings.items()}
        entries = [settings[f"data.train.{index}"] for index in range(count)]
        checked = check_rows(Data.model_validate({"train": entries}))
        assert [*checked.values()] == [36] * count
        assert len({Path(entry["data_files"]).read_bytes() for entry in entries}) == count, "no rows are held out twice"

    @pytest.mark.parametrize(
        ("name", "layout"), [("qwen3_8b_qlora_dpo_1x24gb", "preference"), ("smollm2_1.7b_lora_kto_1x8gb", "kto")]
    )
    def test_the_stand_in_rows_are_of_the_objectives_layout(self, name: str, layout: Any, tmp_path: Path) -> None:
        """A chat's own last answer is the better one; judged answers are wanted in turn."""
        recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe
        found = changes(recipe, read_strategy("single"), SHRUNK, processes=1, folder=tmp_path)
        small = load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides(found)).recipe
        assert small.training.objective == recipe.training.objective
        assert {entry.format for entry in small.data.sets} == {layout}
        assert small.data.unit == recipe.data.unit
        file = Path(str(small.data.train[0].data_files))
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        chats = [json.loads(line)["messages"] for line in SAMPLE_CHAT.read_text("utf-8").splitlines()]
        read = [
            row.read for row in RowReader(resolve(DataSet(path="json", data_files=str(file), format=layout))).rows()
        ]
        for number, (chat, row, content) in enumerate(zip(chats, rows, read, strict=True)):
            other = chats[(number + 1) % len(chats)][-1]
            assert row["prompt"] == chat[:-1]
            if layout == "preference":
                assert {*row} == {"prompt", "chosen", "rejected"}
                assert isinstance(content, Pair)
                assert isinstance(content.chosen, Chat)
                assert isinstance(content.rejected, Chat)
                answers = content.chosen.messages[-1], content.rejected.messages[-1]
                assert [each["content"] for each in answers] == [chat[-1]["content"], other["content"]]
            else:
                assert {*row} == {"prompt", "completion", "label"}
                assert isinstance(content, Judged)
                assert isinstance(content.answer, Chat)
                assert content.desirable == (number % 2 == 0)
                assert content.answer.messages[-1]["content"] == (chat[-1] if content.desirable else other)["content"]

    @pytest.mark.parametrize(("kind", "noun"), [("dpo", "pairs"), ("kto", "judged answers")])
    def test_a_reference_of_another_size_is_left_out(self, kind: str, noun: str, tmp_path: Path) -> None:
        file = preference_recipe(tmp_path, Path("x"), kind)
        before, after, notes = rehearsed(file, f"{kind}.reference=Qwen/Qwen3-8B")
        assert before.preferences is not None
        assert after.preferences is not None
        assert (before.preferences.reference, after.preferences.reference) == ("Qwen/Qwen3-8B", "start")
        assert f"{kind}.reference: start instead of Qwen/Qwen3-8B, which fits the real model alone" in notes
        assert any(f"4 steps of 4 {noun}" in note or f"4 steps of 2 {noun}" in note for note in notes)
        for kept in ("start", "adapter_off"):
            _, after, _ = rehearsed(file, f"{kind}.reference={kept}", "lora={}")
            assert after.preferences is not None
            assert after.preferences.reference == kept

    @pytest.mark.parametrize("state", ["running", "finished"])
    def test_a_kill_that_came_after_the_end_is_none(
        self, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The processes were there to be killed, but only to write the run's pages."""
        starts = []
        job = TrainingJob(tmp_path / "recipe.yaml", (), 1, tmp_path)

        @contextmanager
        def begun(job: TrainingJob) -> Iterator[None]:
            starts.append(1)
            for step in (SAVED_AFTER, STEPS):
                (job.run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
            ended = {"state": state if len(starts) == 1 else "running"}
            (job.run_dir / "run_state.json").write_text(json.dumps(ended))
            facts = {"held_share": 1.0, "mesh": {}}
            dtypes = {"master": "float32", "compute": "float32"}
            receipt = {"sharding": facts, "world_size": 1, "dtypes": dtypes, "strategy": "single"}
            (job.run_dir / "receipt.json").write_text(json.dumps(receipt))
            yield

        monkeypatch.setattr(rehearsals, "started", begun)
        monkeypatch.setattr(rehearsals, "wait_until", lambda *_: [])
        monkeypatch.setattr(rehearsals, "kill_all", lambda *_: 2)
        rehearsals.train_and_kill(job, Checklist(lambda line: None))
        assert len(starts) == (2 if state == "finished" else 1)

    def test_another_curve(self) -> None:
        other = [*CURVE[:-1], (STEPS, 2.0, 0.5 + 2**-50)]
        with pytest.raises(StepFailed, match=r"step 4: .*before the kill, .*resumed"):
            same_curve(CURVE, other)
        with pytest.raises(StepFailed, match="4 steps were logged before the kill, 2 by the resumed run"):
            same_curve(CURVE, CURVE[:SAVED_AFTER])

    @pytest.mark.parametrize(
        ("files", "text"),
        [
            ([], "neither adapter/ nor model/"),
            (["model/config.json"], "model/ holds no weights"),
            (["adapter/a.safetensors", "adapter/x.bin"], "holds .*x.bin.*safetensors alone"),
        ],
    )
    def test_no_export(self, files: list[str], text: str, tmp_path: Path) -> None:
        for name in files:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        with pytest.raises(StepFailed, match=text):
            exported(tmp_path)

    def test_sharding_in_a_line(self) -> None:
        facts = {"held_share": 0.5, "mesh": {"copies": 2, "shards": 2}}
        receipt = {"strategy": "hsdp", "world_size": 4, "sharding": facts}
        receipt["dtypes"] = {"master": "float32", "compute": "bfloat16"}
        expected = (
            "hsdp on 4: each rank holds 50% of the weights, mesh 2 copies x 2 shards; float32 masters, bfloat16 compute"
        )
        assert sharding(receipt) == expected

    def test_a_line_that_failed_ends_the_list(self) -> None:
        lines: list[dict[str, Any]] = []
        checklist = Checklist(lines.append)
        with checklist.line("loads") as step:
            step["seen"] = "a model"
        with pytest.raises(StepFailed), checklist.line("trains"):
            raise EnvironmentMismatch("no such thing")
        assert [(line["name"], line["ok"], line["seen"]) for line in lines] == [
            ("loads", True, "a model"),
            ("trains", False, "no such thing"),
        ]
        assert checklist.exit_code == 4

    def test_on_the_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = io.StringIO()
        monkeypatch.setattr(rehearsals, "Console", lambda **_: Console(file=stream, width=300))
        with rehearsals.checklist_printer(quiet=False) as log:
            log({"name": "loads", "ok": True, "seconds": 1.25, "seen": "a model"})
            log({"differs": "device: [one] process"})
            log({"name": "trains", "ok": False, "seconds": 20.0, "seen": "no such thing"})
        lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
        assert lines[:3] == [
            "ok 1.2 s loads a model",
            "differs: device: [one] process",
            "FAILED 20.0 s trains no such thing",
        ]
        assert lines[3].endswith(": trains")
        assert lines[3].startswith("failed in")


def write_exported_checkpoint(run: Path, trained: dict[str, torch.Tensor]) -> None:
    """Of step 4, which the receipt names, and a newer one of other weights."""
    others = {name: tensor + 1 for name, tensor in trained.items()}
    for step, tensors in ((4, trained), (6, others)):
        write_checkpoint(run, step, {"model": tensors, "optimizer": {}}, {}, keep=2)
    (run / "receipt.json").write_text('{"export": {"step": 4}}', "utf-8")


@pytest.fixture
def lora_run(tiny_llama: Path, tmp_path: Path) -> tuple[Recipe, Path]:
    """A run folder with a checkpoint and the adapter of the same weights."""
    model = get_peft_model(tiny_model(), LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    trained = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    write_exported_checkpoint(tmp_path, trained)
    export_adapter(model, trained, tiny_tokenizer(), tmp_path, base=str(tiny_llama))
    return Recipe.model_validate(QUICK | {"model": {"name_or_path": str(tiny_llama)}, "lora": {"r": 4}}), tmp_path


class TestLoadBack:
    def test_adapter(self, lora_run: tuple[Recipe, Path]) -> None:
        assert load_back(*lora_run) == "by plain peft: 28 tensors and the logits equal the checkpoint's"

    def test_one_element_of_one_tensor(self, lora_run: tuple[Recipe, Path]) -> None:
        file = lora_run[1] / "adapter" / "adapter_model.safetensors"
        tensors = load_file(file)
        name = sorted(tensors)[3]
        tensors[name].view(-1)[0] += 1e-6
        save_file(tensors, file)
        with pytest.raises(FinetuneError, match=r"export: 1 of 28 tensors differ from the checkpoint, first .*lora_"):
            load_back(*lora_run)

    def test_another_scale(self, lora_run: tuple[Recipe, Path]) -> None:
        """Weights are right and the adapter is not."""
        file = lora_run[1] / "adapter" / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 16}))
        with pytest.raises(FinetuneError, match=r"export: adapter_config.json: lora_alpha is 16"):
            load_back(*lora_run)

    def test_nothing_learned(self, tiny_llama: Path, tmp_path: Path) -> None:
        model = tiny_model()
        trained = {name: tensor.detach() for name, tensor in model.named_parameters()}
        write_exported_checkpoint(tmp_path, trained)
        shutil.copytree(tiny_llama, tmp_path / "model")
        section = {"name_or_path": str(tiny_llama), "dtype": "float32"}
        with pytest.raises(FinetuneError, match="nothing was learned"):
            load_back(Recipe.model_validate(QUICK | {"model": section, "lora": None}), tmp_path)


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A process with two below it."""
    script = "import subprocess, sys, time; [subprocess.Popen(['sleep', '60']) for _ in range(2)]; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
        yield process
        kill_all(process)


def test_kill_all_leaves_none(family: subprocess.Popen[bytes], tmp_path: Path) -> None:
    job = TrainingJob(Path("r.yaml"), (), 1, tmp_path)
    known: list[psutil.Process] = []

    def grown() -> bool:
        known[:] = psutil.Process(family.pid).children(recursive=True)
        return len(known) == 2

    wait_until(grown, job, family)
    assert kill_all(family) == 3
    assert not any(psutil.pid_exists(child.pid) and child.status() != psutil.STATUS_ZOMBIE for child in known)
    assert kill_all(family) == 0


def test_every_recipe_was_rehearsed() -> None:
    """benchmarks/rehearse_all.py, after the last change of a recipe."""
    results = json.loads((RESULTS / "rehearse.json").read_text("utf-8"))["recipes"]
    every = recipes()
    assert set(results) == set(every)
    again = "run python benchmarks/rehearse_all.py"
    assert [name for name, path in every.items() if not stands(results[name], path)] == [], again
    lines = ["loads", f"trains {STEPS} steps", "killed unsaved", "resumed the same", "exported", "loaded back"]
    for name, row in results.items():
        assert [step["name"] for step in row["steps"] if step["ok"]][-6:] == lines, name
        assert 0 < row["seconds"] < LONGEST_SECONDS


def test_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(write_recipe(tmp_path, "nobody/knows-it")), "--json"]) == 4
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["exit_code"], len(report["steps"])) == (False, 4, 1)
    assert "its configuration is not on this machine" in report["steps"][0]["seen"]
    assert main(["rehearse", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_the_small_tokenizer_has_no_new_token(tiny_llama: Path, tmp_path: Path) -> None:
    """However often the rows have its text."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"text": f"zuzuzu zuzuzu {number}"}) + "\n" for number in range(50)))
    data = Data.model_validate({"train": [{"path": "json", "data_files": str(chats)}]})
    for tokens in ((), ("zuzuzu",)):
        shrink_model(str(tiny_llama), "main", data, tmp_path / "small", tokens)
        pieces = AutoTokenizer.from_pretrained(tmp_path / "small").encode("zuzuzu")
        assert len(pieces) == (6 if tokens else 1)


@pytest.mark.slow
class TestRehearse:
    @pytest.mark.parametrize(
        ("strategy", "method", "text"),
        [
            ("single", "lora: {r: 4}\nquantization: {load_in_4bit: true}\n", "single on 1: one process"),
            ("fsdp2", "lora: null\n", "fsdp2 on 2: each rank holds 50% of the weights, mesh 2 shards"),
        ],
    )
    def test_kill_resume_load_back(
        self, strategy: str, method: str, text: str, tiny_llama: Path, tmp_path: Path
    ) -> None:
        lines: list[dict[str, Any]] = []
        recipe = write_recipe(tmp_path, str(tiny_llama), f"accelerate_config: {strategy}\n{method}")
        report = rehearse(recipe, [], log=lines.append)
        assert report["ok"], report["steps"]
        assert report["steps"] == [line for line in lines if "differs" not in line]
        assert report["steps"][1]["seen"].startswith(text)
        assert report["receipt"]["strategy"] == strategy
        assert not list(tmp_path.glob("run*")), "the recipe's own run folder stays untouched"

    @pytest.mark.parametrize(("strategy", "lora"), [("fsdp2", "{r: 4}"), ("zero3", "null")])
    def test_new_tokens(self, strategy: str, lora: str, tiny_llama: Path, tmp_path: Path) -> None:
        """Of which one is in the rows that the small tokenizer learns from, and no token of the base's."""
        recipe = write_recipe(tmp_path, str(tiny_llama), f"accelerate_config: {strategy}\nlora: {lora}\n")
        report = rehearse(recipe, ["model.add_tokens=[<date>, bird]"], log=lambda line: None)
        assert report["ok"], report["steps"]

    def test_a_spoilt_export_is_caught(self, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def spoil(run_dir: Path) -> str:
            seen = exported(run_dir)
            file = run_dir / "adapter" / "adapter_model.safetensors"
            save_file({name: tensor * 1.001 for name, tensor in load_file(file).items()}, file)
            return seen

        monkeypatch.setattr(rehearsals, "exported", spoil)
        report = rehearse(write_recipe(tmp_path, str(tiny_llama)), [], log=lambda line: None)
        assert (report["ok"], report["exit_code"]) == (False, 2)
        assert "28 of 28 tensors differ" in report["steps"][-1]["seen"]

    def test_a_strategy_that_cannot_train_the_recipe(self, tiny_llama: Path, tmp_path: Path) -> None:
        recipe = write_recipe(tmp_path, str(tiny_llama), "accelerate_config: zero2\ntraining: {optim: adamw_8bit}\n")
        report = rehearse(recipe, [], log=lambda line: None)
        assert (report["ok"], report["exit_code"]) == (False, 2)
        assert "ZeRO shards state by elements" in report["steps"][-1]["seen"]
