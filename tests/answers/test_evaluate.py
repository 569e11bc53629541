"""finetune eval: the trainer's own figures again, from the finished run alone; lm-eval on a task of one's own."""

from __future__ import annotations

import gc
import json
import math
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune import finished_run as load_module
from finetune.answers import by_ranks, evaluation
from finetune.answers.by_ranks import Computing
from finetune.answers.lm_eval_tasks import task_figures
from finetune.answers.requests import EvalRequest
from finetune.cli.main import main
from finetune.finished_run import finished_run as load_run
from finetune.train import main as train
from tests.support.models.tiny import write_chats
from tests.support.runs.finished import finished_run
from tests.support.runs.recipes import tiny_lora, write_recipe

pytestmark = pytest.mark.usefixtures("forget_the_last_run")

LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def recipe(folder: Path, base: Path, chats: Path) -> Path:
    held_out: dict[str, Any] = {"data": {"eval": {"fraction": 0.4}}, "training": {"max_steps": 2}}
    return write_recipe(folder, tiny_lora(base, chats, **held_out, output_dir=str(folder / "run")))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.mixed_precision=bf16", "model.dtype=bfloat16", "lora.lora_dropout=0.3"],
        ["data.packing=false", "model.attention=sdpa", "training.per_device_batch_size=2"],
        ["lora=null"],
        ["quantization={load_in_4bit: true}"],
    ],
    ids=["lora", "bf16", "padded", "full", "nf4"],
)
def test_the_figures_of_the_training_come_again(
    tmp_path: Path, tiny_llama: Path, chats: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([str(recipe(tmp_path, tiny_llama, chats)), *overrides]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)["held_out"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    before, *_, after = [line for line in lines if line["kind"] == "eval"]
    assert actual["tuned"]["loss"] == pytest.approx(after["loss"], rel=1e-6)
    assert actual["recorded"] == after["loss"]
    assert actual["base"]["loss"] == pytest.approx(before["loss"], rel=1e-6)
    assert actual["base"]["loss"] > actual["tuned"]["loss"] + 1e-3
    assert actual["tuned"]["perplexity"] == pytest.approx(math.exp(after["loss"]))
    assert actual["documents"] == 4


@pytest.mark.slow
def test_the_mean_is_over_tokens(tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against plain transformers, one document at a time: a mean of documents' means would be another number."""
    run = finished_run(tmp_path, tiny_llama, lora=None)
    assert main(["eval", str(run), "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)["held_out"]
    from finetune.model.new_tokens import load_tokenizer
    from finetune.recipe.loader import recipe_from_resolved
    from finetune.tokens.dataset import prepare

    loaded = recipe_from_resolved(run / "recipe.yaml")
    prepared = prepare(loaded, load_tokenizer(loaded))
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()
    sums, tokens, means = 0.0, 0, []
    for index in prepared.split.held_out:
        ids, labels = (torch.from_numpy(part)[None] for part in prepared.pool.document(int(index)))
        with torch.no_grad():
            mean = float(model(input_ids=ids, labels=labels, use_cache=False).loss)
        learned = int((labels[:, 1:] != -100).sum())
        sums, tokens, means = sums + mean * learned, tokens + learned, [*means, mean]
    assert actual["tokens"] == tokens
    assert actual["tuned"]["loss"] == pytest.approx(sums / tokens, rel=1e-5)
    assert abs(sums / tokens - sum(means) / len(means)) > 1e-4 * sums / tokens


@pytest.mark.parametrize("objective", ["supervised", "dpo"])
def test_the_base_answers_alike_whatever_run_it_is_compared_with(
    objective: str, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are loaded with the layers of training. The library's round otherwise (docs/log.md), which a tiny model
    does not show.
    """
    run = finished_run(tmp_path, tiny_llama, data={"eval": None}, training={"objective": objective})
    opened = mock.Mock(side_effect=NotImplementedError)
    monkeypatch.setattr(by_ranks, "models_of", opened)
    asked = EvalRequest(general=True, generate=False)
    with pytest.raises(NotImplementedError):
        evaluation.measure(load_run(run), Computing(torch.device("cpu")), asked, print, print)
    assert opened.call_args.kwargs["with_loss"] is True


@pytest.mark.parametrize("tasks", [False, True])
def test_one_model_is_in_memory_at_a_time(
    tasks: bool, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and tuned model of an all-weights run: 8B in bfloat16 would take 32 GB instead of 16."""
    run = finished_run(tmp_path, tiny_llama, lora=None)
    alive: list[weakref.ref[Any]] = []
    load = load_module.load_whole

    def counted(*args: Any, **options: Any) -> Any:
        gc.collect()
        assert [ref() for ref in alive if ref() is not None] == []
        model = load(*args, **options)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(load_module, "load_whole", counted)
    if tasks:
        # lm-eval's place is taken: what is held here is held between its calls.
        task = SimpleNamespace(OUTPUT_TYPE="multiple_choice")
        manager = SimpleNamespace(match_tasks=lambda names: names, load=lambda names: {"tasks": {names[0]: task}})
        monkeypatch.setitem(
            sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=lambda *_, **options: {"results": {"a": {}}})
        )
        monkeypatch.setitem(
            sys.modules, "lm_eval.models.huggingface", SimpleNamespace(HFLM=lambda pretrained, **_: [pretrained])
        )
        monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=lambda include_path: manager))
        figures = task_figures(load_run(run), torch.device("cpu"), EvalRequest(tasks=["a"]), lambda _: None)
        assert (len(alive), figures["tuned"]) == (2, {"a": {}})
        return
    measured = evaluation.measure(
        load_run(run), Computing(torch.device("cpu")), EvalRequest(generate=False), lambda _: None, lambda _: None
    )
    assert len(alive) == 2
    assert measured[0]["held_out"]["base"]["loss"] != measured[0]["held_out"]["tuned"]["loss"]


def test_without_held_out_rows(tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, tiny_llama, data={"eval": None})
    assert main(["eval", str(run)]) == 2
    remedy = "name rows: --data FILE, or --general or --tasks"
    assert capsys.readouterr().err == f"{run}: its recipe holds no rows out (data.eval is null); {remedy}\n"


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def local_task(folder: Path) -> Path:
    """A multiple choice that a model of the chats' words can be asked without a network."""
    rows = [
        {"question": f"a {word}", "choices": ["boat", "bridge"], "answer": index % 2}
        for index, word in enumerate(["river", "road", "hill", "stone", "bird", "morning"])
    ]
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    task: dict[str, Any] = {
        "task": "boat_or_bridge",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "boat_or_bridge.yaml").write_text(json.dumps(task), "utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # lm-eval's and its libraries' own
def test_a_task_of_ones_own(tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    run, folder = finished_run(tmp_path, tiny_llama), local_task(tmp_path / "tasks")
    words = ["eval", str(run), "--tasks", "boat_or_bridge", "--include", str(folder)]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["held_out"]["documents"] > 0
    for which in ("base", "tuned"):
        assert result["tasks"][which]["boat_or_bridge"]["acc"] == pytest.approx(by_hand(run, folder, which))
    assert main([*words, "--limit", "2"]) == 0
    assert "boat_or_bridge" in capsys.readouterr().out
    assert main(["eval", str(run), "--tasks", "no_such_task_anywhere"]) == 2
    assert "lm-eval does not know no_such_task_anywhere" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # lm-eval's and its libraries' own
@pytest.mark.parametrize(
    ("option", "generates", "chooses"),
    [([], True, False), (["--chat-template"], True, True), (["--no-chat-template"], False, False)],
    ids=["default", "for all", "for none"],
)
def test_the_chat_template_is_for_tasks_that_generate(
    option: list[str],
    generates: bool,
    chooses: bool,
    tmp_path: Path,
    tiny_llama: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompts that lm-eval gives to the model, and few-shot examples as turns."""
    lm_eval = pytest.importorskip("lm_eval.models.huggingface")
    run, folder = finished_run(tmp_path, tiny_llama), local_task(tmp_path / "tasks")
    task = json.loads((folder / "boat_or_bridge.yaml").read_text("utf-8"))
    task |= {"task": "say_it", "output_type": "generate_until", "doc_to_target": "{{choices[0]}}"}
    task |= {"num_fewshot": 1, "fewshot_split": "test", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}}
    task |= {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    del task["doc_to_choice"]
    (folder / "say_it.yaml").write_text(json.dumps(task), "utf-8")
    prompts: dict[str, list[str]] = {"generate_until": [], "loglikelihood": []}

    def recorded(name: str) -> Any:
        genuine = getattr(lm_eval.HFLM, name)

        def call(self: Any, requests: Any, *arguments: Any, **options: Any) -> Any:
            prompts[name].extend(request.args[0] for request in requests)
            return genuine(self, requests, *arguments, **options)

        return call

    for name in prompts:
        monkeypatch.setattr(lm_eval.HFLM, name, recorded(name))
    words = ["eval", str(run), "--tasks", "boat_or_bridge,say_it", "--include", str(folder), "--limit", "2"]
    assert main([*words, "--loss-only", *option]) == 0
    turn = "<|im_start|>user"
    assert prompts["generate_until"]
    assert {turn in prompt for prompt in prompts["generate_until"]} == {generates}
    if generates:  # one example and the question
        assert {prompt.count(turn) for prompt in prompts["generate_until"]} == {2}
    assert {turn in prompt for prompt in prompts["loglikelihood"]} == {chooses}
    assert "chat template: " in capsys.readouterr().out
    assert json.loads((run / "eval.json").read_text("utf-8"))["tasks"]["chat_template"] == {
        "boat_or_bridge": chooses,
        "say_it": generates,
    }


def by_hand(run: Path, folder: Path, which: str) -> float:
    """The task's accuracy: which of the two choices, after a blank, has the higher probability."""
    from finetune.finished_run import finished_run as open_finished
    from finetune.finished_run import models_of
    from finetune.model.new_tokens import load_tokenizer

    opened = open_finished(run)
    tokenizer = load_tokenizer(opened.recipe)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]
    for name, model in models_of(opened, torch.device("cpu"), with_loss=False):
        if name != which:
            continue
        right = []
        for row in rows:
            sums = []
            for choice in row["choices"]:
                prompt = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
                tokens = tokenizer(f"{row['question']} {choice}", add_special_tokens=False)["input_ids"]
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits.log_softmax(-1)
                sums.append(sum(float(logits[0, at - 1, tokens[at]]) for at in range(len(prompt), len(tokens))))
            right.append(max(range(2), key=lambda index: sums[index]) == row["answer"])
        return sum(right) / len(right)
    raise AssertionError(which)


def test_without_lm_eval_it_is_one_line(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    run = finished_run(tmp_path, tiny_llama, data={"eval": None})
    assert main(["eval", str(run), "--tasks", "arc_easy"]) == 4
    assert "pip install -e '.[eval]'" in capsys.readouterr().err
