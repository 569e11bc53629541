"""`finetune report`: the page says what the run's files say, stands alone, and never disturbs a training."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from finetune.cli.main import main as cli
from finetune.recipe.sections.preferences import warnings_of
from finetune.report.curves import curve, curves, loss_chart, read_runs, summary
from finetune.report.pictures import (
    Chart,
    Series,
    _draw,
    inline_svg,
    new_figure,
    number_label,
    save_png,
    spikes,
    thinned,
)
from finetune.report.run_page import question_of, report, write_page, write_pages
from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny, write_recipe

pytestmark = pytest.mark.draws
VOID = {"meta", "path", "use", "rect"}
PLAN = {"phases": {"forward": {"peak_bytes": 2**32}}}
NETWORK = re.compile(r"<script|<link|https?:|src=|@import|url\((?!#)|href=\"(?!#)")


class WellFormed(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def text_of(html: str) -> str:
    parser = WellFormed()
    parser.feed(html)
    assert parser.open == []
    return "".join(parser.texts)


def write_run(folder: Path, *, steps: int, loss: float = 3.0, phases: bool = False) -> Path:
    folder.mkdir(parents=True)
    recipe = {
        "model": {"name_or_path": "some/model"},
        "data": {"train": [{"path": "json", "data_files": "rows.jsonl"}]},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"output_dir": str(folder)}), "utf-8")
    lines: list[dict[str, Any]] = [{"kind": "eval", "step": 0, "loss": 4.5, "perplexity": 90.0}]
    for step in range(1, steps + 1):
        numbers = {"loss": loss / step, "grad_norm": None if step == 2 else 1.0, "learning_rate": 1e-4 * step}
        rates = {"tokens": 100, "step_seconds": 9.0 if step == 1 else 0.5, "tokens_per_second": 200.0}
        lines.append({"kind": "train", "step": step, **numbers, **rates, "data_wait_fraction": 0.01})
        lines[-1]["peak_memory_gib"] = 1.25
    lines.append({"kind": "eval", "step": steps, "loss": 2.5, "perplexity": 12.2})
    if phases:
        lines += [
            {"kind": "phase", "step": 1, "rank": rank, "phase": "forward", "peak_gib": 3.0 + rank} for rank in (0, 1)
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    receipt: dict[str, Any] = {"strategy": "ddp", "world_size": 2, "device": "cpu", "parameters": {"trained": 12345}}
    (folder / "receipt.json").write_text(json.dumps(receipt), "utf-8")
    (folder / "run_state.json").write_text(json.dumps({"state": "finished"}), "utf-8")
    samples = [
        {"when": when, "prompt": "a <b> & c", "answer": f"{when}!", "reference": "so"} for when in ("before", "after")
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples), "utf-8")
    return folder


def test_the_page_says_what_the_files_say(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "one", steps=5, phases=True)], lambda run: PLAN)
    html = report(runs)
    text = text_of(html)
    for words in (
        "Run one",
        "finished",
        "ddp on 2 x cpu",
        "12,345",
        "4.5000 to 2.5000",
        "a <b> & c",
        "before!",
        "after!",
    ):
        assert words in text
    assert tuple(re.findall(r"(planned)(4\.000)", text)[0]) == ("planned", "4.000")
    assert "measured4.000" in text  # the rank with the most
    assert "some/model" in text
    assert not NETWORK.search(html)
    assert "prefers-color-scheme: dark" in html


def test_each_evaluation_set_has_its_curve(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", steps=5)
    sets = [
        {"kind": "eval", "step": step, "loss": 2.0, "perplexity": 7.4, "chat_loss": 3.0 - step, "sql_loss": 1.0}
        for step in (0, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sets), "utf-8")
    by_set = {chart.title: chart for chart in curves(read_runs([folder]))}["Held-out loss by data set"]
    assert [(each.name, list(each.points)) for each in by_set.series] == [
        ("chat", [(0, 3.0), (4, -1.0)]),
        ("sql", [(0, 1.0), (4, 1.0)]),
    ]
    assert "Held-out loss by data set" in text_of(report(read_runs([folder])))


def test_the_row_of_the_table_is_arithmetic(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "one", steps=5)])
    row = summary(run)
    assert row["s per 20 steps"] == "10.00"  # 20 x 0.5 s; the first step of 9 s warms up
    assert row["tokens/s"] == "200"
    assert row["loss"] == "0.6000"
    assert row["peak GiB"] == "1.25"


@pytest.mark.thorough
def test_several_runs_lie_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_run(tmp_path / name / "run", steps=4, loss=loss) for name, loss in (("a", 3.0), ("b", 5.0))]
    assert cli(["report", *map(str, folders), "-o", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["runs"]) == ["a/run", "b/run"]
    html = (tmp_path / "out" / "report.html").read_text("utf-8")
    loss_chart = html[html.index('aria-label="Loss"') : html.index("</svg>")]
    assert (len(curves_of(loss_chart)), loss_chart.count("<use")) == (2, 4)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert text_of(html).count("a/run") > 1


def test_a_comparison_stands_for_its_jobs(tmp_path: Path) -> None:
    for name in ("zero2", "zero3"):
        write_run(tmp_path / "jobs" / name, steps=3, phases=True)
    (tmp_path / "compare.json").write_text("{}", "utf-8")
    text = text_of(report(read_runs([tmp_path])))
    assert "zero2, measured4.000" in text
    assert "zero3, measured4.000" in text


@pytest.mark.slow
def test_a_long_run_stays_small(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / str(index), steps=20_000) for index in range(2)])
    assert len(report(runs).encode()) < 400_000


def test_no_run_and_the_same_run_twice_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["report", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    run = write_run(tmp_path / "one", steps=1)
    assert cli(["report", str(run), str(run)]) == 2
    assert "name each once" in capsys.readouterr().err


@pytest.mark.thorough
def test_what_fails_is_reported_and_disturbs_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=1)
    (run / "report.html").mkdir()
    lines: list[str] = []
    write_page(run, lines.append)
    write_pages(run, lines.append)
    assert len(lines) == 2
    assert all(line.startswith("the report was not written: ") for line in lines)


def test_training_writes_it_at_each_evaluation_and_at_the_end(tmp_path: Path, tiny_llama: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", [30, 45, 60, 80])
    sections: dict[str, Any] = {
        "lora": {"r": 2},
        "data": {"eval": {"fraction": 0.3}, "max_length": 128},
        "training": {"global_batch_size": 1, "max_steps": 2},
        "samples": {"count": 1, "max_new_tokens": 2},
        "eval_steps": 1,
        "output_dir": str(tmp_path / "run"),
    }
    assert main([str(write_recipe(tmp_path, tiny(tiny_llama, chats, **sections)))]) == 0
    text = text_of((tmp_path / "run" / "report.html").read_text("utf-8"))
    assert "finished" in text
    assert "single on 1 x cpu" in text
    for picture in ("loss.png", "memory.png"):
        assert (tmp_path / "run" / picture).read_bytes().startswith(b"\x89PNG")


def test_thinned_keeps_the_mean_and_the_end() -> None:
    points = [(float(step), float(step % 7)) for step in range(10_001)]
    fewer = thinned(points, most=101)
    assert len(fewer) <= 101
    assert fewer[-1] == points[-1]
    assert sum(value for _, value in fewer[:-1]) / len(fewer[:-1]) == pytest.approx(3.0, abs=0.01)


def curves_of(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each curve, in the picture's units: y grows downwards."""
    paths = re.findall(r'<path d="([^"]+)"[^>]*stroke-width: 1.4', svg)
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)] for path in paths]


def labels_of(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_line_is_drawn_where_its_values_are() -> None:
    chart = Chart("t", [Series("x", [(0, 0.0), (5, 1.0), (10, float("nan")), (10, 0.5)])])
    ((left, middle, right),) = curves_of(inline_svg(chart))
    assert middle[0] - left[0] == pytest.approx(right[0] - middle[0], abs=0.03)
    assert left[1] - right[1] == pytest.approx(right[1] - middle[1], abs=0.03)
    assert labels_of(inline_svg(chart)) == ["0", "2", "4", "6", "8", "10", "0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert inline_svg(Chart("t", [Series("x", []), Series("y", [(1, float("inf"))])])) == ""


@pytest.mark.parametrize(
    ("changed", "highest", "told"),
    [
        ({}, 3.0, []),
        ({30: 15.4}, 3.0, ["15.4"]),
        ({20: 15.4, 40: 1234.0, 41: 20.5}, 3.0, ["15.4", "1,230", "20.5"]),
        ({0: 9.0, 1: 6.0, 59: 8.0}, 9.0, []),  # a beginning, and an end, are no spikes
        ({10: 15.0, 20: 15.0, 30: 15.0, 40: 15.0}, 15.0, []),  # so are four
    ],
)
def test_one_spike_does_not_flatten_a_curve(changed: dict[int, float], highest: float, told: list[str]) -> None:
    points = [(float(step), changed.get(step, 2.0 + step % 3 / 2)) for step in range(60)]
    labels = labels_of(inline_svg(Chart("t", [Series("x", points)])))
    assert [label for label in labels if label in told] == told
    numbers = [float(label.replace(",", "")) for label in labels if label not in told]
    assert highest <= numbers[-1] <= highest + 2
    assert spikes(points[:1]) == spikes(points[:4]) == []


def test_bars_leave_a_gap_for_what_was_not_measured() -> None:
    bars = [Series("planned", [(0, 1.0), (1, 2.0)]), Series("measured", [(1, 4.0)])]
    svg = inline_svg(Chart("t", bars, ["load", "step"]))
    corners = re.findall(r"M [\d.]+ ([\d.]+) \nL [\d.]+ [\d.]+ \nL [\d.]+ ([\d.]+) \n", svg)
    planned, more, measured = (float(foot) - float(top) for foot, top in corners)
    assert measured == pytest.approx(2 * more, rel=0.01) == pytest.approx(4 * planned, rel=0.01)
    assert labels_of(svg)[-3:] == ["1", "2", "4"]


def noisy_run(folder: Path, *, steps: int, without: range = range(0), logging_steps: int = 1) -> Path:
    """A run of uneven losses and supervised tokens, without the lines of some steps."""
    write_run(folder, steps=1)
    lines = []
    for step in range(logging_steps, steps + 1, logging_steps):
        figures = {"tokens": 100 * logging_steps, "step_seconds": 0.5, "tokens_per_second": 200.0}
        figures |= {"learning_rate": 1e-4, "peak_memory_gib": 1.0, "supervised_tokens": 50 + 37 * step % 11}
        lines.append({"kind": "train", "step": step, "loss": 3.0 + (-1) ** step + 1 / step, **figures})
    text = "".join(json.dumps(line) + "\n" for line in lines if line["step"] not in without)
    (folder / "metrics.jsonl").write_text(text, "utf-8")
    (folder / "run_state.json").write_text(json.dumps({"state": "finished", "step": steps}), "utf-8")
    return folder


@pytest.mark.parametrize(("steps", "logging_steps", "window"), [(60, 1, 5), (240, 1, 21), (240, 10, 5)])
def test_the_smoothed_loss_is_the_mean_that_its_legend_names(
    tmp_path: Path, steps: int, logging_steps: int, window: int
) -> None:
    runs = read_runs([noisy_run(tmp_path / "one", steps=steps, logging_steps=logging_steps)])
    single, mean = loss_chart(runs).series[:2]
    assert (single.name, single.faint) == ("training", True)
    assert mean.name == f"training, mean of {window * logging_steps} steps"
    lines = runs[0].facts.trained()
    for index, (step, value) in enumerate(mean.points):
        near = lines[max(0, index - window // 2) : index + window // 2 + 1]
        tokens = np.array([line["supervised_tokens"] for line in near], float)
        losses = np.array([line["loss"] for line in near])
        assert (step, value) == (lines[index]["step"], pytest.approx(np.average(losses, weights=tokens)))
    (faint, strong) = [colour for name, colour in loss_chart(runs).legend if name.startswith("training")]
    assert faint.startswith(strong), "one colour, and less of it"


def test_several_runs_have_one_colour_each_in_every_chart(tmp_path: Path) -> None:
    runs = read_runs([noisy_run(tmp_path / name, steps=60) for name in ("one", "two")])
    for folder in (tmp_path / "one", tmp_path / "two"):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "eval", "step": 60, "loss": 2.0, "perplexity": 7.4}\n')
    colours: dict[str, set[str]] = {"one": set(), "two": set()}
    for name, colour in [*loss_chart(runs).legend, *curve(runs, "Seconds a step", "step_seconds").legend]:
        colours[name.partition(",")[0]].add(colour[:7])
    assert [len(each) for each in colours.values()] == [1, 1]
    assert not colours["one"] & colours["two"]
    # The names stand once, beside the first of the charts.
    assert report(runs).count("colours as above") >= 3
    assert "colours as above" not in report(runs[:1])


def test_a_short_run_is_not_smoothed(tmp_path: Path) -> None:
    chart = loss_chart(read_runs([noisy_run(tmp_path / "one", steps=19)]))
    assert [(each.name, each.faint) for each in chart.series] == [("training", False)]


@pytest.mark.thorough
def test_lost_steps_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = noisy_run(tmp_path / "one", steps=19, without=range(8, 12))
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st\n')
    assert cli(["report", str(run)]) == 0
    told = "metrics.jsonl: no line for steps 8 to 11, 1 torn line passed over"
    assert capsys.readouterr().err.endswith(f"\n{run}: {told}; the report shows where\n")
    lines: list[str] = []
    write_pages(run, lines.append)
    assert lines[0] == f"{run}: {told}; the report shows where"
    assert told in text_of((run / "report.html").read_text("utf-8"))
    whole = read_runs([noisy_run(tmp_path / "whole", steps=19)])
    assert whole[0].facts.missing() == ""
    assert "no line for" not in report(whole)


def test_letters_are_of_one_size_at_a_charts_own_width(tmp_path: Path) -> None:
    html = report(read_runs([write_run(tmp_path / "one", steps=30, phases=True)], lambda run: PLAN))
    pictures = re.findall(r'<figure class="(\w+)">.*?<svg viewBox="0 0 (\d+) \d+"(.*?)</svg>', html, re.DOTALL)
    assert {(size, int(width)) for size, width, _ in pictures} == {("page", 1104), ("column", 352)}
    assert pictures[0][0] == "page", "the loss"
    for _, _, picture in pictures:
        assert set(re.findall(r"font-size: ([\d.]+)px|font: ([\d.]+)px", picture)) <= {("12", ""), ("", "12")}
        assert "12px" in picture
    assert 'name="viewport" content="width=device-width' in html


@pytest.mark.thorough
def test_memory_is_that_of_the_process_or_of_tensors(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=3, phases=True)
    text = text_of(report(read_runs([run])))
    assert "Seconds a step" in text
    assert "Peak memory of the process, GiB" in text
    assert "peak GiB, the process" in text
    assert "Peak memory of a rank's tensors by phase, GiB" in text
    receipt = json.loads((run / "receipt.json").read_text("utf-8"))
    measured = {"process_peak_bytes": 3 * 2**29, "reserved_bytes": None, "phases": {"forward": {"peak_bytes": 1}}}
    receipt["memory"] = {"planned": None, "measured": measured}
    (run / "receipt.json").write_text(json.dumps(receipt), "utf-8")
    assert "The process took 1.500 GiB at its peak" in text_of(report(read_runs([run])))
    measured["reserved_bytes"] = 2**31
    (run / "receipt.json").write_text(json.dumps(receipt | {"device": "NVIDIA L4"}), "utf-8")
    text = text_of(report(read_runs([run])))
    assert "CUDA's allocator reserved 2.000 GiB" in text
    assert "Peak memory of tensors on the GPU, GiB" in text


def test_numbers_of_an_axis_are_short() -> None:
    assert [number_label(value) for value in (12000, 0.0002, 2e-5, 0.0, -3.5)] == [
        "12,000",
        "0.0002",
        "2e-05",
        "0",
        "-3.5",
    ]


def test_an_inlined_chart_takes_its_colours_from_the_page() -> None:
    chart = Chart("t", [Series("curve", [(1, 1.0), (2, 3.0)]), Series("dots", [(1, 2.0)], dots=True)])
    svg = inline_svg(chart)
    assert not re.search(r"<style|<!|<\?|<image|@font-face|font-family|xmlns|#000|#fff|white|black", svg)
    assert not re.search(r"<text[^>]*fill", svg)
    assert len(svg) < 6000


@pytest.mark.thorough
def test_charts_of_a_page_share_no_id_and_are_the_same_each_time(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "one", steps=9, phases=True)], lambda run: PLAN)
    html = report(runs)
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) >= 7
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", html)) | set(re.findall(r'href="#([^"]+)"', html)) == set(ids)
    assert report(runs) == html


def test_nothing_of_a_runs_data_becomes_markup(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script><img src=x onerror=y>{{ title }}$x_1$&amp;\"'"
    folder = write_run(tmp_path / "<b onclick=z>", steps=3)
    for file in ("receipt.json", "run_state.json", "environment.json"):
        (folder / file).write_text(json.dumps({"error": evil, "strategy": evil, evil: evil}), "utf-8")
    lines = [{"when": when, "prompt": evil, "answer": evil, "reference": evil} for when in ("before", "after")]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text("utf-8"))
    recipe["model"]["name_or_path"] = evil
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    for runs in ([folder], [folder, write_run(tmp_path / "other" / "{{ 6 * 7 }}", steps=3)]):
        html = report(read_runs(runs))
        assert not re.search(r"<script|<img|<b onclick", html)
        assert evil in text_of(html)
    assert "{{ 6 * 7 }}" in text_of(html)


def test_a_runs_name_is_no_formula_in_a_picture(tmp_path: Path) -> None:
    names = ("costs $1 or \\$2 $", "_hidden")
    chart = Chart("t", [Series(name, [(1, 1.0), (2, 2.0)]) for name in names])
    save_png(chart, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_lone_run_is_told_to_others_first(tmp_path: Path) -> None:
    """Sentences, answers and the loss come first, then the trainer's part, without the receipt's empty values."""
    folder = write_run(tmp_path / "one", steps=5)
    receipt = json.loads((folder / "receipt.json").read_text())
    receipt["parameters"]["frozen"] = 87_655
    receipt |= {
        "data": {"documents": 252, "tokens": 20_481, "supervised_tokens": 8_313},
        "pipeline": None,
    }
    (folder / "receipt.json").write_text(json.dumps(receipt))
    text = text_of(report(read_runs([folder])))
    for sentence in (
        "252 examples of rows, 20,481 tokens; 8,313 of them are supervised",
        "12,345 of 100,000 parameters (12.3%)",
        "5 steps in 11 s on one CPU",
        "loss 4.500 before, 2.500 after (44% lower)",
    ):
        assert sentence in text
    places = [text.index(words) for words in ("What was measured", "before!", "For the trainer", "Learning rate")]
    assert places == sorted(places)
    assert "pipeline" not in text


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nWas?<|im_end|>\n<|im_start|>assistant\n", "Was?"),
        ("<|start_header_id|>user<|end_header_id|>\n\nWas?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
         "Was?"),
        ("<bos><start_of_turn>user\nWas?<end_of_turn>\n<start_of_turn>model\n", "Was?"),
        ("<s>[INST] Was? [/INST]", "Was?"),
        ("A text that goes on", "A text that goes on"),
    ],
)  # fmt: skip
def test_the_question_is_found_in_a_rendered_prompt(prompt: str, question: str) -> None:
    assert question_of(prompt) == question


def of_steps(accuracies: list[float], **figures: float) -> list[dict[str, float]]:
    return [{"step": step, "reward_accuracy": value, **figures} for step, value in enumerate(accuracies, 1)]


@pytest.mark.parametrize(
    ("trained", "exported", "words"),
    [
        (of_steps([0, 1, 1, 1, 1, 1]), None, ["Reward accuracy was 100 % from step 2 on"]),
        (of_steps([0, 1, 1, 1, 1, 0.75, 1]), None, []),
        (of_steps([0, 1, 1, 1, 1]), None, []),  # four lines are too few
        (of_steps([0, 0.5, 0.7, 1, 1, 1, 1, 1]), None, []),  # it was learned
        (of_steps([0, 0.5], kl_by_token=0.9), None, ["KL by token 0.90 is over 0.8"]),
        (of_steps([0, 0.5], kl_by_token=0.9), {"kl_by_token": 0.2}, []),  # the exported step is an earlier one
        (of_steps([0, 0.5], kl_by_token=-3.1), None, []),
        (of_steps([0, *[0.5] * 5], kl=0.0), None, ["The KL baseline was 0"]),  # KTO
        (of_steps([0, *[0.5] * 5], kl=0.1), None, []),
        (of_steps([0, 0.5], kl=0.0), None, []),
        ([], None, []),
        ([{"step": 1, "loss": 2.0}], None, []),  # supervised
    ],
)
def test_what_the_docs_call_bad_is_said(trained: list[Any], exported: Any, words: list[str]) -> None:
    found = [*warnings_of(trained, exported)]
    assert [line[: len(text)] for line, text in zip(found, words, strict=True)] == words


def test_steps_of_one_pair_are_right_by_chance_for_a_while() -> None:
    """Of real judgements two thirds are right: five steps of one pair each are all right in every eighth run."""
    assert [*warnings_of(of_steps([0.0] + [1.0] * 10), None, 1)] == []
    assert len([*warnings_of(of_steps([0.0] + [1.0] * 20), None, 1)]) == 1
    assert len([*warnings_of(of_steps([0.0] + [1.0] * 5), None, 4)]) == 1


@pytest.mark.thorough
def test_labels_of_narrow_bars_stand_upright(tmp_path: Path) -> None:
    """24 bars of a PNG: their labels, lying, would run into one another."""
    bars = [(float(group), 0.505) for group in range(6)]
    for series, upright in ((1, False), (4, True)):
        chart = Chart("memory", [Series(f"run {number}", bars) for number in range(series)], [str(n) for n in range(6)])
        save_png(chart, tmp_path / "memory.png")
        figure = new_figure(figsize=(8.0, 4.5))
        axes = figure.subplots()
        _draw(axes, chart, letters=12)
        figure.canvas.draw()
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 6 * series
        assert not any(a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[:place])
        assert {text.get_rotation() for text in axes.texts} == {90.0 if upright else 0.0}
