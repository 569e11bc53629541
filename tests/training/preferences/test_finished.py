"""A finished run on preferences, as every verb shows it: report, card, eval, merge, export, chat, trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main as cli
from finetune.hub.model_card import PAPERS
from finetune.hub.push import Destination, prepare_upload
from finetune.recipe.loader import load_recipe
from finetune.recipe.sections.preferences import Dpo, Kto, is_own_reference, objective_in_words
from finetune.report.curves import curves, read_runs, rewards_chart, summary
from finetune.report.run_page import report
from finetune.report.trackers import metric_values
from finetune.run_folder.checkpoint import step_folder
from finetune.run_folder.facts import is_as_written
from finetune.train import main as train
from tests.support.runs.preferences import lines_of, preference_recipe, write_base

# All of them share trained runs. The verbs are tested on supervised runs, the curve of pairs in test_one_curve.py.
pytestmark = pytest.mark.thorough

HELD_OUT: dict[str, Any] = {"data": {"eval": {"fraction": 0.25}}, "samples": {"count": 2, "max_new_tokens": 4}}
BEST: dict[str, Any] = {
    "training": {
        "num_train_epochs": 6,
        "metric_for_best_model": "eval_reward_accuracy",
        "load_best_model_at_end": True,
        "early_stopping_patience": 3,
    },
    "eval_steps": 4,
    "save_steps": 4,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def trained(folder: Path, base: Path, kind: str, *changes: dict[str, Any]) -> Path:
    assert train([str(preference_recipe(folder, base, kind, HELD_OUT, *changes))]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def dpo(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27 steps of an adapter, which give smoothed curves; the best is found by accuracy."""
    return trained(tmp_path_factory.mktemp("dpo"), base, "dpo", BEST, {"lora": {"r": 4}, "training": {"seed": 1}})


@pytest.fixture(scope="module")
def kto(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("kto"), base, "kto")


def receipt_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "receipt.json").read_text("utf-8")))


@pytest.mark.thorough
def test_the_best_step_has_the_highest_accuracy(dpo: Path) -> None:
    found = {line["step"]: line["reward_accuracy"] for line in lines_of(dpo, "eval") if line["step"]}
    best = max(found, key=lambda step: found[step])  # the first of equal ones
    expected = {"step": best, "best": True, "metric": "eval_reward_accuracy", "loss": found[best]}
    assert receipt_of(dpo)["export"] == expected
    assert step_folder(dpo, best).is_dir(), "its checkpoint is kept"
    steps = list(found)
    later = steps[steps.index(best) + 1 :]
    assert len(later) == 3 or steps[-1] == 27, "three evaluations without a better one end the run"
    assert summary(read_runs([dpo])[0])["exported"] == f"step {best}, the best: reward accuracy {found[best]:.1%}"


def test_a_reward_that_nothing_is_held_out_for(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = preference_recipe(tmp_path / "run", base, "dpo", BEST)
    assert cli(["check", str(recipe)]) == 2
    assert "needs held-out rows" in capsys.readouterr().err
    assert cli(["check", str(recipe), "data.eval={fraction: 0.2}"]) == 0
    supervised = ["training.metric_for_best_model=eval_reward_accuracy", "training.objective=supervised"]
    assert cli(["check", str(recipe), "data.eval={fraction: 0.2}", *supervised]) == 2
    assert "eval_reward_accuracy, which no evaluation measures; write eval_loss" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_report_draws_rewards(kind: str, request: pytest.FixtureRequest) -> None:
    runs = read_runs([request.getfixturevalue(kind)])
    charts = {chart.title: chart for chart in curves(runs)}
    evals = [line for line in runs[0].facts.evals() if line["step"]]
    names = {name for name in charts if "means of" not in name}
    assert {"Loss", "Reward accuracy, %", "Reward margin, chosen less rejected"} <= names
    accuracy = charts["Reward accuracy, %"]
    dots = next(series for series in accuracy.series if series.dots)
    expected = [(line["step"], 100 * line["reward_accuracy"]) for line in evals]
    assert list(dots.points) == expected, "without the start, where no reward differs from 0"
    rewards = next(chart for title, chart in charts.items() if title.startswith("Rewards"))
    assert [series.name for series in rewards.series] == [
        "chosen", "rejected", "chosen, held out", "rejected, held out"
    ]  # fmt: skip
    assert [name for name in charts if name.startswith("KL")] == [
        "KL to the reference, by token" if kind == "dpo" else "KL baseline"
    ]
    assert [name.partition(",")[0] for name in charts if name.startswith("Log-prob")] == [
        "Log-probability by token" if kind == "dpo" else "Log-probability of an answer"
    ]
    html = report(runs)
    noun = {"dpo": "pair", "kto": "judged answer"}[kind]
    assert f"Data: 18 {noun}s of rows" in html
    assert f"of 6 held-out {noun}s" in html
    assert objective_in_words(runs[0].facts.recipe.preferences or Dpo()) in html
    key = receipt_of(runs[0].folder)["reference"]["key"]
    assert f"<td>key</td><td>{key}</td>" in html
    assert html.index("What was measured") < html.index("For the trainer") < html.index("Reward accuracy, %")
    assert (runs[0].folder / "rewards.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_several_runs_share_each_chart(dpo: Path, kto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.planner.plan_of_run", lambda *_: (None, "not planned here"))
    runs = read_runs([dpo, kto])
    titles = [chart.title for chart in curves(runs)]
    assert titles[:3] == ["Loss", "Reward accuracy, %", "Reward margin, chosen less rejected"]
    assert {"Rewards, chosen", "Rewards, rejected", "Log-probability by token, chosen"} <= {*titles}
    assert [series.colour for series in rewards_chart(runs).series] == [0, 0, 1, 1]
    assert cli(["report", str(dpo), str(kto), "-o", str(tmp_path / "both")]) == 0
    assert {file.name for file in (tmp_path / "both").iterdir()} == {
        "report.html", "loss.png", "rewards.png", "memory.png"
    }  # fmt: skip
    html = (tmp_path / "both" / "report.html").read_text("utf-8")
    assert "The objectives differ, so the losses do not compare." in html
    assert "DPO on pairs of answers, beta 0.1" in html
    assert "The objectives differ" not in report([runs[0], runs[0]])


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_card_tells_the_objective(kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    card = prepare_upload(run, Destination("me/model")).card
    evals, key = lines_of(run, "eval"), receipt_of(run)["reference"]["key"]
    exported = next(line for line in evals if line["step"] == receipt_of(run)["export"]["step"])
    assert f"\n- {kind}\n" in card
    assert "- sft\n" not in card
    assert f"| reference | start, log-probabilities with the hash {key} |" in card
    assert "| when | step | loss | reward accuracy | reward margin |" in card
    assert "| before training | 0 | 0." in card
    assert f" | {exported['loss']:.4f} | {exported['reward_accuracy']:.1%} | " in card
    assert f"type: reward_accuracy\n      value: {round(exported['reward_accuracy'], 6)}" in card
    assert "perplexity" not in card
    paper = PAPERS["sigmoid" if kind == "dpo" else "kto"]
    assert f"[{paper.title}](https://huggingface.co/papers/{paper.arxiv})" in card
    assert "![The rewards of chosen and rejected answers](rewards.png)" in card
    noun = {"dpo": "pairs", "kto": "judged answers"}[kind]
    assert f"| {noun} per step | 4 |" in card
    assert f"On 6 held-out {noun}:" in card


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (Dpo(), "DPO on pairs of answers, beta 0.1, against the model that the run started from"),
        (
            Dpo(loss_type="robust", label_smoothing=0.2, sft_weight=0.5, reference="adapter_off"),
            "robust DPO on pairs of answers, beta 0.1, label smoothing 0.2, supervised loss of the chosen answers with "
            "weight 0.5, against the base without adapters",
        ),
        (Dpo(loss_type="simpo", beta=2), "SimPO on pairs of answers, beta 2, gamma 0.5, without a reference"),
        (Dpo(loss_type="ipo", reference="a/b"), "IPO on pairs of answers, beta 0.1, against a/b"),
        (
            Kto(undesirable_weight=1.5),
            "KTO on judged answers, beta 0.1, weights 1 (wanted), 1.5 (unwanted), against the model that the run "
            "started from",
        ),
    ],
)
def test_objectives_in_words(section: Dpo | Kto, words: str) -> None:
    assert objective_in_words(section) == words


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_eval_scores_wanted_answers_and_repeats_the_runs_loss(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    run = request.getfixturevalue(kind)
    capsys.readouterr()
    assert cli(["eval", str(run)]) == 0
    said = capsys.readouterr().out
    exported = next(line for line in lines_of(run, "eval") if line["step"] == receipt_of(run)["export"]["step"])
    assert "held-out loss: not measured again, because a loss of preferences compares with the run's own start" in said
    assert f"the run itself wrote held-out loss {exported['loss']:.4f}, reward accuracy" in said
    found = json.loads((run / "eval.json").read_text("utf-8"))
    assert found["held_out"]["recorded"] == exported["loss"]
    assert found["held_out"]["reward_accuracy"] == exported["reward_accuracy"]
    rows = [json.loads(line) for line in (run.parent / "rows.jsonl").read_text("utf-8").splitlines()]
    answers = [json.loads(line) for line in (run / "eval_answers.jsonl").read_text("utf-8").splitlines()]
    assert len(answers) == found["scores"]["rows"] > 0
    for answer in answers:
        row = rows[int(answer["place"].rpartition(":")[2]) - 1]
        wanted = row["chosen"] if kind == "dpo" else row["completion"]
        assert row.get("label", True), "an unwanted answer is no reference"
        assert answer["reference"] == wanted[0]["content"]
    if kind == "kto":
        assert "left out as references: unwanted ones" in said


def test_eval_of_the_loss_alone_loads_no_model(
    dpo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("finetune.answers.evaluation.models_by_ranks", loads)
    assert cli(["eval", str(dpo), "--loss-only", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["held_out"]) == {"recorded", "reward_accuracy", "reward_margin"}


@pytest.mark.thorough
def test_eval_says_that_the_base_is_not_the_start(
    dpo: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base of a run that goes on with an adapter lacks that adapter too."""
    start = {"model": {"adapter": str(dpo / "adapter")}, "lora": {"r": 4}, "training": {"max_steps": 1}}
    run = trained(tmp_path / "second", base, "dpo", start)
    capsys.readouterr()
    assert cli(["eval", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"base: without the adapter {dpo / 'adapter'} that this training started from" in said
    assert json.loads((run / "eval.json").read_text("utf-8"))["started_from"] == str(dpo / "adapter")
    assert "scores" in read_runs([run])[0].facts.evaluated
    assert cli(["eval", str(dpo)]) == 0
    assert "started from" not in capsys.readouterr().out


@pytest.mark.sample(2, thorough=6)
@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([{"prompt": "the boat", "completion": "sing"}], 1),
        ([{"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "sing"}]}], 1),
        ([{"prompt": "the boat", "chosen": "sing", "rejected": "sea"}] * 2, 2),
    ],
    ids=["prompt_completion", "messages", "pairs"],
)
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_eval_answers_plain_files_too(
    kind: str,
    rows: list[dict[str, Any]],
    count: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    run = request.getfixturevalue(kind)
    capsys.readouterr()
    assert cli(["eval", str(run), "--data", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["rows"] == count
    answers = (run / "eval_answers.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["reference"] for line in answers] == ["sing"] * count


def test_samples_compare_with_no_unwanted_answer(kto: Path) -> None:
    rows = [json.loads(line) for line in (kto.parent / "rows.jsonl").read_text("utf-8").splitlines()]
    unwanted = {row["completion"][0]["content"] for row in rows if not row["label"]}
    lines = [json.loads(line) for line in (kto / "samples.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 4
    assert not unwanted & {line["reference"] for line in lines}


@pytest.mark.thorough
def test_other_verbs_take_the_run(dpo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["merge", str(dpo), "--verify", "2"]) == 0
    assert "same top token" in capsys.readouterr().out
    first = min(int(folder.name[5:]) for folder in (dpo / "checkpoints").iterdir())
    assert cli(["export", str(dpo), "--step", str(first), "--to", str(tmp_path / "step")]) == 0
    assert (tmp_path / "step" / "rewards.png").is_file()
    assert "| loss type | sigmoid |" in prepare_upload(tmp_path / "step", Destination("me/step")).card
    assert cli(["push", str(dpo), "me/model", "--dry-run"]) == 0
    assert "rewards.png" in capsys.readouterr().out
    assert cli(["check", str(dpo / "recipe.yaml"), "--resolved"]) == 0
    assert "loss_type: sigmoid" in capsys.readouterr().out
    loaded = load_recipe(dpo / "recipe.yaml").recipe
    assert (loaded.training.objective, loaded.data.train[0].format) == ("dpo", "preference")


def test_trackers_get_every_reward(dpo: Path) -> None:
    (line, *_), (_, evaluation, *_) = lines_of(dpo), lines_of(dpo, "eval")
    sent = dict(metric_values(line)) | dict(metric_values(evaluation))
    names = ["reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected", "kl_by_token"]
    names += ["logp_chosen_by_token", "logps_rejected"]
    for name in names:
        assert sent[f"train/{name}"] == line[name]
        assert sent[f"eval/{name}"] == evaluation[name]


def test_a_line_whose_reward_is_no_number_is_torn() -> None:
    line = {"kind": "eval", "step": 1, "loss": 0.5, "reward_accuracy": 0.5, "kl": 0.1}
    assert is_as_written(line)
    assert is_as_written(line | {"reward_margin": None})
    assert not is_as_written(line | {"reward_margin": "much"})
    assert not is_as_written(line | {"kl": [1]})
    assert is_own_reference(line | {"step": 0, "reward_margin": 1e-7})
    assert not is_own_reference(line | {"step": 0, "reward_margin": -0.01})
    assert not is_own_reference(line | {"reward_margin": 0.0})
