"""`finetune import --prove`: TRL's own training beside the imported recipe's, and the causes of each difference."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from finetune.importers import Imported, convert
from finetune.preflight import foreign_trainer, proof_lines, prove, prove_import
from finetune.preflight.job import train_lines
from finetune.preflight.prove import Cause, Curve, Sides, distance, find_causes, first_difference, foreign_setting
from finetune.recipe.loader import load_recipe
from finetune.train import main as train
from tests.importers.test_preferences import SMOLLM3, ZEPHYR
from tests.support.models.tiny import write_chats
from tests.support.rows.others_configs import AXOLOTL_LORA_8B, EXAMPLES

Values = dict[str, Any]
# As a stranger would write it to run code, to push or to be told of the run.
HOSTILE: Values = {
    "trust_remote_code": True, "push_to_hub": True, "hub_model_id": "evil/it", "hub_token": "hf_evilevilevilevilevil",
    "report_to": ["wandb"], "callbacks": "evil.module", "plugins": ["evil.plugin.Plugin"], "run_name": "evil",
    "model_init_kwargs": {"trust_remote_code": True}, "dataset_kwargs": {"evil": 1}, "logging_dir": "/evil",
    "optim": "evil.Optimizer", "lr_scheduler_kwargs": {"evil": "import os"}, "resume_from_checkpoint": "/evil",
    "accelerator_config": "/evil.json", "deepspeed": None, "lora_target_modules": ["q_proj", "(evil+)+$"],
    "dataset_text_field": "evil\nfield", "packing": False, "learning_rate": 1e-3, "beta": None,
}  # fmt: skip


# -- what is refused, and what passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words", "said"),
    [
        (AXOLOTL_LORA_8B, [], "axolotl's own trainer has not been tried"),
        ({"model_name_or_path": "a/b", "train_file": "x.txt", "block_size": 64}, [], "block_size: is run_clm's"),
        (
            {"model_name_or_path": "a/b", "dataset_name": "c/d"},
            ["--python", "/no/python"],
            "--python: /no/python: is no",
        ),
        ({"model_name_or_path": "a/b", "dataset_name": "c/d"}, ["-o", "new.yaml"], "-o: --prove writes no recipe"),
        ({"model_name_or_path": "a/b", "dataset_name": "none.jsonl", "packing": False}, [], "none.jsonl"),
        ({"model_name_or_path": "a/b", "dataset_name": "c/d", "num_generations": 4}, [], "trains on answers"),
        ({"model_name_or_path": "a/b", "dataset_name": "c/d", "learning_rate": "fast"}, [], "learning_rate"),
    ],
)
def test_bad_input_is_one_line(
    values: Values, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(file), "--prove", *words]) == 2
    output = capsys.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1), output.err
    assert said in output.err
    assert list(tmp_path.iterdir()) == [file]


def test_python_is_for_prove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tmp_path), "--python", sys.executable]) == 2
    assert "--python: is for --prove" in capsys.readouterr().err


def test_numbers_switches_and_words_alone_pass(tmp_path: Path) -> None:
    (page := tmp_path / "recipe.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: [{path: c/d}]}\n")
    setting = foreign_setting(HOSTILE, load_recipe(page).recipe, Path("/folder"), [])
    assert "evil" not in json.dumps(setting)
    assert setting["config"] == {
        "packing": False, "learning_rate": 1e-3, "beta": None, "optim": "adamw_torch", "lr_scheduler_kwargs": {},
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_length": 384,
    }  # fmt: skip
    assert (setting["fixed"]["report_to"], setting["fixed"]["push_to_hub"]) == ([], False)


def test_the_child_cannot_connect_or_start_a_program() -> None:
    tries = """
import os, resource, runpy, socket, subprocess, sys
runpy.run_path(sys.argv[1])["shut_in"]()
for work in (lambda: socket.create_connection(("127.0.0.1", 9)), lambda: subprocess.run(["true"]),
             lambda: os.system("true"), lambda: os.execv("/bin/true", ["true"])):
    try:
        work()
        print("did it")
    except PermissionError as error:
        print(error)
print(resource.getrlimit(resource.RLIMIT_CPU)[0])
"""
    process = subprocess.run([sys.executable, "-c", tries, str(prove.CHILD)], capture_output=True, text=True)
    lines = process.stdout.splitlines()
    assert [line for line in lines if "not allowed here" in line] == lines[:4], process.stderr
    assert len(lines) == 5
    assert int(lines[4]) == 1200


# -- the search for causes ---------------------------------------------------------------------------------------------


def curve(*losses: float) -> Curve:
    return [{"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3} for loss in losses]


@pytest.mark.parametrize(
    ("needed", "left", "found", "explained"),
    [
        (set(), 0.0, [], True),
        ({"mask"}, 0.0, ["mask"], True),
        ({"mask", "mean"}, 0.0, ["mask", "mean"], True),
        ({"mask"}, 0.3, ["mask"], False),  # something else is different too
        ({"unknown"}, 0.0, [], False),
    ],
)
def test_causes_are_those_that_keep_the_curves_apart(
    needed: set[str], left: float, found: list[str], explained: bool
) -> None:
    """A tool whose loss is 1 higher for each cause that is on. `rates` changes nothing."""
    causes = [Cause(name, {name: True}, said=False) for name in ("rates", "mask", "mean")]

    def ask(request: Mapping[str, Any]) -> dict[str, Any]:
        return {"steps": curve(2.0 + left + sum(name not in request for name in needed))}

    theirs = ask({})["steps"]
    differences, is_explained = find_causes(ask, {}, causes, theirs, curve(2.0))
    assert [difference["cause"] for difference in differences] == found
    assert is_explained == explained
    for difference in differences:  # with it alone
        assert difference["moves"] == pytest.approx((left + 1) / 2)


def test_a_training_that_fails_is_no_explanation() -> None:
    causes = [Cause("mask", {"mask": True}, said=False)]
    found, explained = find_causes(lambda request: {"error": "ValueError"}, {}, causes, curve(3.0), curve(2.0))
    assert (found, explained) == ([], False)


def test_the_bounds() -> None:
    assert distance(curve(2.0, 1.0), curve(2.0, 1.0 + 9e-5)) <= 1 < distance(curve(2.0, 1.0), curve(2.0, 1.0 + 2e-4))
    assert distance(curve(2.0), curve(2.0, 1.0)) == float("inf")
    unclipped = [{**step, "grad_norm": None} for step in curve(2.0)]
    assert distance(unclipped, curve(2.0)) == 0


def test_the_first_difference_in_words() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    ids = [ord(letter) for letter in "question answer"]
    answer = [index >= 9 for index in range(len(ids))]
    everything = [False] + [True] * (len(ids) - 1)
    assert first_difference([(ids, everything)], [(ids, answer)], decode) == (
        "token 2 and the next, 'uestion ', supervised by TRL alone"
    )
    assert first_difference([([1, *ids], [False, *answer])], [(ids, answer)], decode).startswith(
        "from token 1 on '\\x01questio' by TRL, 'question'"
    )
    assert first_difference([([*ids, 33], [*answer, True])], [(ids, answer)], decode) == (
        "from token 16 on '!' by TRL, '' by the recipe"
    )


# -- real trainings ----------------------------------------------------------------------------------------------------


def in_this_process(sides: Sides, folder: Path) -> Curve:
    """The recipe's training without a launcher, which takes half of the time."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    assert train([str(folder / "recipe.yaml"), *sides.words, f"output_dir={folder / 'run'}"]) == 0
    return [{key: line[key] for key in prove.SAME_CURVE} for line in train_lines(folder / "run")]


@contextmanager
def trl_in_this_process(
    python: Path, setting: Values, folder: Path
) -> Iterator[tuple[str, Callable[[Mapping[str, Any]], Values]]]:
    """The child's work without the child, whose imports take most of its time."""

    def ask(request: Mapping[str, Any]) -> Values:
        return json.loads(json.dumps(foreign_trainer.train_foreign(json.loads(json.dumps(setting)), request)))  # type: ignore[no-any-return]

    yield "here", ask


def write(file: Path, values: Values) -> Path:
    file.write_text(yaml.safe_dump(values), "utf-8")
    return file


def proof(file: Path, **options: Any) -> dict[str, Any]:
    return prove_import(file, tool=None, gpus=None, python=None, log=lambda line: None, **options)


def planted_child(folder: Path, before: str, planted: str) -> Path:
    """The child with lines before a line of it."""
    text = prove.CHILD.read_text("utf-8")
    assert text.count(before) == 1
    (child := folder / "child.py").write_text(text.replace(before, planted + before), "utf-8")
    return child


@pytest.fixture
def chats(tiny_llama: Path, tmp_path: Path) -> Values:
    rows = write_chats(tmp_path / "chats.jsonl", [20 + (index * 17) % 60 for index in range(70)])
    return {"model_name_or_path": str(tiny_llama), "dataset_name": str(rows), "learning_rate": 1e-3}


@pytest.mark.slow
def test_both_train_the_same(chats: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command and a real launch; nothing is left behind."""
    values = chats | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    file = write(tmp_path / "theirs.yaml", values)
    before = sorted(tmp_path.iterdir())
    assert main(["import", str(file), "--prove", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["same"]
    assert report["largest_difference"]["loss"] < 1e-5
    assert (len(report["theirs"]), len(report["ours"]), report["differences"]) == (20, 20, [])
    assert report["ours"][0]["loss"] > report["ours"][-1]["loss"]
    assert all(text["theirs"] == text["ours"] for text in report["texts"])
    assert len(report["texts"]) == 3
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_a_planted_mask_is_found(chats: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that supervises answers, where TRL supervises whole chats."""

    def wrong(*arguments: Any, **named: Any) -> Imported:
        imported = convert(*arguments, **named)
        assert "train_on: all" in imported.text
        return replace(imported, text=imported.text.replace("train_on: all", "train_on: assistant"), left_out=())

    monkeypatch.setattr(prove, "convert", wrong)
    monkeypatch.setattr(prove, "train_recipe", in_this_process)
    monkeypatch.setattr(prove, "foreign_trainer", trl_in_this_process)
    report = proof(write(tmp_path / "theirs.yaml", chats))
    (difference,) = report["differences"]
    assert (report["exit_code"], report["same"], report["explained"]) == (4, False, True), report["differences"]
    assert re.match(r"masks of 64 of 64 rows: token 2 .*supervised by TRL alone", difference["cause"])
    assert (difference["said"], difference["moves"] > 1e-3) == (False, True)
    assert "NOT said in the recipe" in "\n".join(proof_lines(report))


@pytest.mark.slow
def test_a_planted_mean_is_found(chats: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that takes each micro-batch's mean, as transformers did before 4.46."""
    sft_trainer, config = foreign_trainer.trainer_and_config("SFT")

    class MeanOfMeans(sft_trainer):  # type: ignore[misc,valid-type]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            return super().compute_loss(model, inputs) / self.current_gradient_accumulation_steps

    monkeypatch.setattr(foreign_trainer, "trainer_and_config", lambda name: (MeanOfMeans, config))
    monkeypatch.setattr(prove, "train_recipe", in_this_process)
    monkeypatch.setattr(prove, "foreign_trainer", trl_in_this_process)
    values = chats | {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    report = proof(write(tmp_path / "theirs.yaml", values))
    (difference,) = report["differences"]
    assert (report["exit_code"], report["same"], report["explained"]) == (4, False, True)
    assert difference["cause"].startswith("mean of each micro-batch (2 rows), then of 4")
    assert difference["moves"] > 1e-3


@pytest.mark.slow
def test_nothing_of_a_hostile_file_runs_or_leaves(
    chats: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's environment has no token, and no code that the file or its model names runs."""
    mark = tmp_path / "ran"
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(chats["model_name_or_path"]).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": auto}))
    for folder in (model, tmp_path):
        (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.setenv("HF_TOKEN", "hf_evilevilevilevilevil")
    monkeypatch.setenv("WANDB_API_KEY", "evil")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    seen = tmp_path / "environment.json"
    look = f'    open({str(seen)!r}, "w").write(json.dumps([dict(os.environ), os.getcwd(), sys.path]))\n'
    monkeypatch.setattr(prove, "CHILD", planted_child(tmp_path, "    os.dup2(2, 1)", look))
    monkeypatch.setattr(prove, "train_recipe", in_this_process)
    hostile = {key: value for key, value in HOSTILE.items() if key not in ("lora_target_modules", "dataset_text_field")}
    report = proof(write(tmp_path / "theirs.yaml", hostile | chats | {"model_name_or_path": str(model)}))
    assert report["same"], report["differences"]
    assert not mark.exists()
    environment, folder, path = json.loads(seen.read_text())
    assert "evil" not in json.dumps(environment)
    assert (environment["HF_HUB_OFFLINE"], environment["HOME"]) == ("1", folder)
    assert not Path(folder).exists(), "the temporary folder is removed"
    assert str(tmp_path) not in path


# The import corpus's TRL files, and more as strangers write them: rows, keys, and the differences that are there.

WORDS = "red green blue seven river stone because often never the a of to count walk bridge answer question".split()
LENGTHS = [3 + (number * 11) % 37 for number in range(80)]


def text(length: int, number: int) -> str:
    return " ".join(WORDS[(place * 7 + number * 3 + place * place) % len(WORDS)] for place in range(length))


def turn(role: str, length: int, number: int) -> list[Values]:
    return [{"role": role, "content": text(length, number)}]


ROWS: dict[str, Callable[[int], Values]] = {
    "chats": lambda k: {"messages": [*turn("user", 4, k), *turn("assistant", LENGTHS[k], k + 1),
                                     *turn("user", 3, k + 2), *turn("assistant", LENGTHS[-k], k + 3)]},
    "texts": lambda k: {"content": text(LENGTHS[k], k)},
    "completions": lambda k: {"prompt": f"{text(5, k)} ", "completion": text(LENGTHS[k], k + 1)},
    "answers": lambda k: {"prompt": turn("user", 5, k), "completion": turn("assistant", LENGTHS[k], k + 1)},
    "pairs": lambda k: {"prompt": turn("user", 5, k), "chosen": turn("assistant", LENGTHS[k], k + 1),
                        "rejected": turn("assistant", LENGTHS[-k], k + 5)},
    "judged": lambda k: {"prompt": turn("user", 5, k), "completion": turn("assistant", LENGTHS[k], k + 1),
                         "label": k % 3 > 0},
}  # fmt: skip
LORA: Values = {"use_peft": True, "lora_r": 8, "lora_alpha": 16}
QWEN, SMOL = ({"model_name_or_path": name} for name in ("Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"))


@dataclass(frozen=True)
class Case:
    """A configuration, its rows, and how the causes of its differences begin. `said`: the recipe says all of them."""

    rows: str
    values: Values
    causes: tuple[str, ...] = ()
    said: bool = True


CASES: dict[str, Case] = {
    "assistant": Case("chats", QWEN | {"assistant_only_loss": True, "per_device_train_batch_size": 2,
                                       "gradient_accumulation_steps": 4, "learning_rate": 1e-4}),
    # The prompt ends with a space, which TRL joins with the answer's first word.
    "completion, rslora": Case("completions", SMOL | LORA | {
        "completion_only_loss": True, "use_rslora": True, "lora_target_modules": ["q_proj", "v_proj", "up_proj"],
        "lora_dropout": 0.1, "learning_rate": 2e-4, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine",
    }, ("tokens of 64", "learning rates: 0, 0.0005")),
    "answers by default": Case("answers", SMOL | {"learning_rate": 1e-4, "gradient_accumulation_steps": 2,
                                                  "per_device_train_batch_size": 4}, ("masks of 64",)),
    "packing": Case("chats", QWEN | {"packing": True, "max_length": 512, "learning_rate": 1e-4,
                                     "per_device_train_batch_size": 2}),
    "neftune": Case("chats", QWEN | {"neftune_noise_alpha": 5, "learning_rate": 1e-4}, ("neftune_noise_alpha",)),
    "dpo and sft": Case("pairs", SMOL | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "beta": 0.1,
                                         "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
                                         "learning_rate": 5e-7}, ("masks of 64", "mean of each micro-batch")),
    "ipo, rslora": Case("pairs", QWEN | LORA | {
        "loss_type": "ipo", "beta": 0.05, "use_rslora": True, "warmup_ratio": 0.1, "learning_rate": 5e-6,
        "lora_target_modules": "all-linear", "per_device_train_batch_size": 4,
    }, ("masks of 64", "learning rates: 0")),
    "kto": Case("judged", SMOL | {"desirable_weight": 1.3, "undesirable_weight": 1.0, "beta": 0.1,
                                  "per_device_train_batch_size": 4, "learning_rate": 1e-6},
                ("masks of 64", "KL baseline")),
    "decay, no clipping": Case("chats", SMOL | {
        "weight_decay": 0.1, "max_grad_norm": 0, "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 100, "adam_beta2": 0.95, "adam_epsilon": 1e-6,
        "learning_rate": 3e-4,
    }, ("learning rates: 0",)),
    "label smoothing": Case("chats", SMOL | {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 8,
                                             "per_device_train_batch_size": 1, "learning_rate": 1e-4},
                            ("label_smoothing_factor",)),
    # The CPO trainer adds an end token to chats that have one.
    "simpo": Case("pairs", SMOL | {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0,
                                   "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
                                   "learning_rate": 1e-6}, ("tokens of 64",)),
    "texts, adafactor": Case("texts", SMOL | {"dataset_text_field": "content", "optim": "adafactor",
                                              "learning_rate": 1e-3}, ("optim",)),
    "dft": Case("chats", QWEN | {"loss_type": "dft", "learning_rate": 1e-4, "per_device_train_batch_size": 2,
                                 "gradient_accumulation_steps": 2}, ("loss_type",)),
    "zephyr qlora": Case("", EXAMPLES["TRL zephyr qlora"].values, ("learning rates: 0",)),
    "smollm2": Case("", EXAMPLES["TRL smollm2"].values, ("learning rates: 0",)),
    "example_config": Case("", EXAMPLES["TRL example_config"].values),
    "zephyr dpo": Case("", ZEPHYR, ("masks of 42", "learning rates: 0")),
    "smollm3 apo": Case("", SMOLLM3, ("masks of 40", "learning rates: 0")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")  # TRL 1.16's own
@pytest.mark.parametrize("name", CASES)
def test_each_difference_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    values = dict(case.values)
    if case.rows:
        (rows := tmp_path / f"{case.rows}.jsonl").write_text(
            "".join(json.dumps(ROWS[case.rows](number)) + "\n" for number in range(80))
        )
        values["dataset_name"] = str(rows)
    monkeypatch.setattr(prove, "train_recipe", in_this_process)
    monkeypatch.setattr(prove, "foreign_trainer", trl_in_this_process)
    report = proof(write(tmp_path / "theirs.yaml", values))
    causes = [difference["cause"] for difference in report["differences"]]
    assert len(causes) == len(case.causes), causes
    assert all(cause.startswith(begins) for cause, begins in zip(causes, case.causes, strict=True)), causes
    assert (report["same"], report["explained"], report["ok"]) == (not case.causes, True, case.said), causes
