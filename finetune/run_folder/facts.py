"""A run's facts for model cards and reports, read from its folder. No torch here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import read_lines, torn_lines
from finetune.recipe.schema import Recipe
from finetune.untrusted.json_files import kind_of_value, read_object, unreadable
from finetune.wording import counted

# Exports of other steps: their folder in the run's folder, their record, and the run's records copied beside it.
EXPORTS, EXPORT_RECORD = "exports", "export.json"
EXPORTED_RECORDS = (
    *("recipe.yaml", "receipt.json", "environment.json", "conversation.json", "metrics.jsonl", "samples.jsonl"),
)

# The last `finetune eval`'s figures, and its answers.
EVAL_RECORD, EVAL_ANSWERS = "eval.json", "eval_answers.jsonl"
EVAL_KEPT = "eval_endpoint.jsonl"  # a server's answers, while an evaluation does not have all of them

STATE = "run_state.json"  # how the run goes or ended
STATE_KINDS: dict[str, type] = {"state": str, "step": int, "command": str, "identity": dict}

MOST_RECORD_BYTES = 64 * 2**20  # receipt.json has a checksum for each trained tensor


GENERATION = "generation_config.json"  # transformers' name for it; in adapter/ only with the training's own ends


def require_run_folder(run_dir: Path) -> Path:
    """The recipe's file in a run folder. Raises FinetuneError for other folders.

    Verbs call it before they import torch.
    """
    resolved = run_dir / "recipe.yaml"
    if not resolved.is_file():
        raise FinetuneError(f"{run_dir}: not a run folder (recipe.yaml is missing); name a run's output_dir")
    return resolved


def read_state(run_dir: Path, remedy: str = "choose another output_dir") -> dict[str, Any] | None:
    """Read run_state.json. None if there is none: then no run was here.

    Raises:
        FinetuneError: the file exists and cannot be read.
    """
    try:
        if not (run_dir / STATE).exists():
            return None
        state = read_object(run_dir / STATE)
        for key, kind in STATE_KINDS.items():
            if type(state.get(key)) is not kind:
                raise ValueError(f"{key} is not as a run writes it")
    except (FinetuneError, OSError, ValueError) as error:
        reason = str(error).removeprefix(f"{run_dir / STATE}: ")
        raise FinetuneError(f"{run_dir / STATE}: unreadable ({reason}); {remedy}") from None
    return state


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints, in order. A checkpoint gets its name when it is complete; none is opened."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(int(path.name[5:]) for path in folders if re.fullmatch(r"step-[0-9]{8,18}", path.name))


def not_finished_yet(run_dir: Path) -> FinetuneError:
    """The error for a run that has no result yet: its checkpoints can be used, or it can be continued."""
    steps = saved_steps(run_dir)
    if not steps:
        return FinetuneError(f"{run_dir}: this run has not finished and saved no checkpoint; start its training again")
    step = str(steps[-1])
    export = shlex.join(["finetune", "export", str(run_dir), "--step", step])
    return FinetuneError(
        f"{run_dir}: this run has not finished; add --step {step} to use its last checkpoint, or {export}; or start "
        "its training again, which continues it"
    )


@dataclass(frozen=True)
class RunFacts:
    """The content of a run's folder."""

    recipe: Recipe
    receipt: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    pictures: Sequence[str]
    state: Mapping[str, Any]
    merged: Mapping[str, Any]  # merge.json if the merged model is described; else empty
    torn: int = 0  # lines of metrics.jsonl that cannot be read
    exported: Mapping[str, Any] = field(default_factory=dict)  # export.json if a checkpoint was exported; else empty
    evaluated: Mapping[str, Any] = field(default_factory=dict)  # eval.json if `finetune eval` measured; else empty
    scored_answers: Sequence[Mapping[str, Any]] = ()  # eval_answers.jsonl

    @property
    def is_adapter(self) -> bool:
        """Whether the described model is an adapter and needs its base model."""
        return self.recipe.lora is not None and not self.merged

    def evals(self) -> list[Mapping[str, Any]]:
        """Evaluations in the order of their steps; those without a finite loss are left out."""
        lines = [line for line in self.metrics if line.get("kind") == "eval" and line.get("loss") is not None]
        return sorted(lines, key=lambda line: line["step"])

    def exported_eval(self) -> Mapping[str, Any] | None:
        """The exported weights' evaluation: at the receipt's step, else the last; None: there is none.

        For a checkpoint that was exported later, only its own step counts.
        """
        evals = self.evals()
        step = self.receipt.get("export", {}).get("step")
        for line in evals:
            if line["step"] == step:
                return line
        if evals and not self.exported:
            return evals[-1]
        return None

    def scores(self) -> list[Mapping[str, Any]]:
        """The scored generations in training, in the order of their steps."""
        return sorted((line for line in self.metrics if line.get("kind") == "score"), key=lambda line: line["step"])

    def holes(self) -> list[tuple[int, int]]:
        """(first, last) of each stretch of steps without metrics."""
        return missing_steps(self.metrics, int(self.state.get("step", 0)))

    def missing(self) -> str:
        """The gaps in metrics.jsonl, in words; empty if there are none."""
        return describe_missing(self.holes(), self.torn)

    def trained(self) -> list[Mapping[str, Any]]:
        return [line for line in self.metrics if line.get("kind") == "train"]

    def samples_by_prompt(self) -> dict[str, dict[str, Mapping[str, Any]]]:
        """prompt -> {"before": line, "after": line} from samples.jsonl, in the order of the prompts."""
        answers: dict[str, dict[str, Mapping[str, Any]]] = {}
        for line in self.samples:
            answers.setdefault(str(line.get("prompt")), {})[str(line.get("when"))] = line
        return answers


def score_rows(facts: RunFacts) -> list[tuple[str, str, str, str]]:
    """What `finetune eval` scored, for tables: metric, base, tuned, and the difference with its 95 % interval."""
    scores, general = facts.evaluated.get("scores", {}), facts.evaluated.get("general")
    figures = {name: (figure, scores["rows"]) for name, figure in scores.get("metrics", {}).items()}
    if general:
        figures["general set"] = (general["all"], general["rows"])
    if options := facts.evaluated.get("options"):
        figures["given answers by probability"] = (options["accuracy"], options["rows"])
    rows = []
    for name, (figure, count) in figures.items():
        change = figure["difference"]
        mean, low, high = (100 * change[end] for end in ("mean", "low", "high"))
        interval = f"{mean:+.1f} points ({low:+.1f} to {high:+.1f})"
        not_read = [f"{part['count']:,} {model}" for model, part in figure.get("unread", {}).items() if part["count"]]
        label = f"{name}, {counted(count, 'answer')}" + f" (unread: {', '.join(not_read)})" * bool(not_read)
        rows.append((label, f"{figure['base']['mean']:.1%}", f"{figure['tuned']['mean']:.1%}", interval))
    return rows


def missing_steps(metrics: Sequence[Mapping[str, Any]], until: int) -> list[tuple[int, int]]:
    """(first, last) of each stretch of steps without a training line, up to `until` finished steps.

    A line is a mean over several steps. Its own figures tell how many, because logging_steps may change between starts:
    tokens 8,000 at 1,000 tokens/s and 2 s a step are 8,000 / (1,000 * 2) = 4 steps. Steps since the last line are
    missing only if they would have made another line like it.
    """
    holes, reached, covered = [], 0, 1
    for line in sorted((line for line in metrics if line.get("kind") == "train"), key=lambda line: line["step"]):
        try:
            covered = max(1, round(float(line["tokens"]) / float(line["tokens_per_second"] * line["step_seconds"])))
        except (KeyError, TypeError, ZeroDivisionError):  # without the figures the line covers all steps before it
            covered = line["step"] - reached
        if line["step"] - covered > reached:
            holes.append((reached + 1, line["step"] - covered))
        reached = max(reached, line["step"])
    if until - reached >= max(1, covered):
        return [*holes, (reached + 1, until)]
    return holes


def describe_missing(holes: Sequence[tuple[int, int]], torn: int) -> str:
    """The gaps in metrics.jsonl, in words; empty if there are none."""
    parts = []
    if holes:
        steps = ", ".join(f"{first:,} to {last:,}" if last > first else f"{first:,}" for first, last in holes)
        is_one_step = len(holes) == 1 and holes[0][0] == holes[0][1]
        parts.append(f"no line for {'step' if is_one_step else 'steps'} {steps}")
    if torn:
        parts.append(f"{counted(torn, 'torn line')} passed over")
    if parts:
        return f"metrics.jsonl: {', '.join(parts)}"
    return ""


def lost_lines(run_dir: Path, torn: int, step: int) -> Iterator[str]:
    """A line for the user if metrics.jsonl, which ends at `step`, lacks steps, or had torn lines."""
    file = run_dir / "metrics.jsonl"
    numbered = [line for line in read_lines(file) if isinstance(line.get("step"), int)] if file.exists() else []
    if lost := describe_missing(missing_steps(numbered, step), torn):
        yield f"{run_dir}: {lost}; the report shows where"


# Keys of a receipt and an environment. Each value is an object.
_SECTIONS = frozenset("parameters dtypes export batch optimizer data versions".split())
# A line's numbers. They may be missing from an earlier release's line, and are null if they were not finite.
_NUMBERS = tuple(
    "step epoch loss grad_norm learning_rate supervised_tokens tokens step_seconds tokens_per_second "
    "data_wait_fraction peak_memory_gib peak_gib allocated_gib seconds perplexity".split()
)
_NUMBERS_BEGIN = ("score_", "reward_", "logp", "kl")  # scores, and the figures of preferences
_NEEDED = {
    "train": ("step", "tokens", "step_seconds", "peak_memory_gib"),
    "eval": ("step", "loss"),
    "phase": ("peak_gib",),
    "score": ("step", "rows"),
}


def is_as_written(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics has the values that a run writes, so that it can be drawn."""
    kind = line.get("kind")
    if "kind" in line and not (isinstance(kind, str) and kind in _NEEDED):
        return False
    if any(line.get(key) is None for key in _NEEDED.get(str(kind), ())):
        return False
    for key, value in line.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        needs_number = key in _NUMBERS or key.endswith("_loss") or key.startswith(_NUMBERS_BEGIN)
        if needs_number and value is not None and not is_number:
            return False
    seconds, step = line.get("step_seconds"), line.get("step", 0)
    if seconds is not None and not seconds > 0:  # a divisor; `not >` refuses NaN too
        return False
    # A chart's axis is in doubles, which count every integer below 2^53.
    return type(step) is int and 0 <= step < 2**53 and isinstance(line.get("phase", ""), str)


def read_run(run_dir: Path, recipe: Recipe, *, merged: bool = False) -> RunFacts:
    """Read a run's folder; a missing file counts as empty. `merged`: describe its merged model."""

    def document(name: str) -> dict[str, Any]:
        path = run_dir / name
        if not path.is_file():
            return {}
        content = read_object(path, MOST_RECORD_BYTES)
        for key in _SECTIONS & content.keys():
            if not isinstance(content[key], dict):
                problem = f"{key} is {kind_of_value(content[key])}, where a run writes a section"
                raise unreadable(path, problem, "take the file of the run itself")
        return content

    def lines(name: str) -> list[dict[str, Any]]:
        path = run_dir / name
        return read_lines(path) if path.is_file() else []

    # Lines that no run writes count as torn: `report` says how many there are.
    metrics_file = run_dir / "metrics.jsonl"
    all_metrics = lines("metrics.jsonl")
    metrics = [line for line in all_metrics if is_as_written(line)]
    torn = len(all_metrics) - len(metrics)
    if metrics_file.is_file():
        torn += torn_lines(metrics_file)
    sample_keys = ("when", "prompt", "answer")
    samples = [line for line in lines("samples.jsonl") if all(isinstance(line.get(key), str) for key in sample_keys)]
    pictures = [name for name in ("loss.png", "rewards.png", "memory.png") if (run_dir / name).is_file()]
    return RunFacts(
        recipe,
        document("receipt.json"),
        document("environment.json"),
        metrics,
        samples,
        pictures,
        document("run_state.json"),
        document("merged/merge.json") if merged else {},
        torn,
        document(EXPORT_RECORD),
        *_evaluated(document(EVAL_RECORD), lines(EVAL_ANSWERS)),
    )


def _evaluated(record: dict[str, Any], answers: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """eval.json and its answers; nothing where a value is not what `finetune eval` writes."""

    def is_comparison(figures: Any) -> bool:
        parts = [figures.get(name) for name in ("base", "tuned", "difference")] if isinstance(figures, dict) else [None]
        means = [part.get(end) for part in parts if isinstance(part, dict) for end in ("mean", "low", "high")]
        if len(means) < 9 or not all(isinstance(mean, int | float) for mean in means):
            return False
        not_read = figures.get("unread", {})
        return isinstance(not_read, dict) and all(
            isinstance(unread, dict) and isinstance(unread.get("count"), int) for unread in not_read.values()
        )

    kept: dict[str, Any] = {}

    def is_curve(figures: Any) -> bool:
        points = figures.get("curve") if isinstance(figures, dict) else None
        return isinstance(points, list) and all(
            isinstance(point, dict)
            and isinstance(point.get("right"), dict)
            and all(isinstance(value, int | float) for value in (point.get("probability"), point["right"].get("mean")))
            for point in points
        )

    scores, general, options = record.get("scores"), record.get("general"), record.get("options")
    metrics = scores.get("metrics") if isinstance(scores, dict) and isinstance(scores.get("rows"), int) else None
    if isinstance(metrics, dict) and all(map(is_comparison, metrics.values())):
        kept["scores"] = scores
    if isinstance(general, dict) and isinstance(general.get("rows"), int) and is_comparison(general.get("all")):
        kept["general"] = general
    if (
        isinstance(options, dict)
        and isinstance(options.get("rows"), int)
        and is_comparison(options.get("accuracy"))
        and all(is_curve(options.get(name)) for name in ("base", "tuned"))
    ):
        kept["options"] = options
    texts = ("prompt", "reference", "base", "tuned")
    whole = [row for row in answers if all(isinstance(row.get(key), str) for key in texts)]
    return kept, whole if "scores" in kept else []
