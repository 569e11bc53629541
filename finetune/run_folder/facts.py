"""A run's facts for model cards and reports, read from its folder. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import read_lines, torn_lines
from finetune.recipe.schema import Recipe
from finetune.untrusted.json_files import kind_of_value, read_object, unreadable
from finetune.wording import counted

# What a run handed over at other steps: its folder in the run's, what is copied into it, and its own record.
EXPORTS, EXPORT_RECORD = "exports", "export.json"
EXPORTED_RECORDS = ("recipe.yaml", "receipt.json", "environment.json", "metrics.jsonl", "samples.jsonl")


MOST_RECORD_BYTES = 64 * 2**20  # of receipt.json, which has a checksum of each trained tensor


def require_run_folder(run_dir: Path) -> Path:
    """The recipe's file in a run folder. Raises FinetuneError for other folders; verbs ask before they import torch."""
    resolved = run_dir / "recipe.yaml"
    if not resolved.is_file():
        raise FinetuneError(f"{run_dir}: not a run folder (recipe.yaml is missing); name a run's output_dir")
    return resolved


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
    merged: Mapping[str, Any]  # merge.json where the merged model is described; else empty
    torn: int = 0  # lines of metrics.jsonl that cannot be read
    exported: Mapping[str, Any] = field(default_factory=dict)  # export.json where a checkpoint was exported; else empty

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
        last = evals[-1] if evals and not self.exported else None
        return next((line for line in evals if line["step"] == step), last)

    def holes(self) -> list[tuple[int, int]]:
        """(first, last) for each stretch of steps without metrics."""
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


def missing_steps(metrics: Sequence[Mapping[str, Any]], until: int) -> list[tuple[int, int]]:
    """(first, last) for each stretch of steps without a training line, up to `until` finished steps.

    A line's own figures say how many steps it covers, because logging_steps may change between starts. Steps since the
    last line are missing only if they would have made another line like it.
    """
    holes, reached, each = [], 0, 1
    for line in sorted((line for line in metrics if line.get("kind") == "train"), key=lambda line: line["step"]):
        each = _steps_of(line) or line["step"] - reached
        if line["step"] - each > reached:
            holes.append((reached + 1, line["step"] - each))
        reached = max(reached, line["step"])
    if until - reached >= max(1, each):
        return [*holes, (reached + 1, until)]
    return holes


def _steps_of(line: Mapping[str, Any]) -> int:
    """Steps that a line is the mean of; 0 where it does not hold the figures."""
    try:
        return max(1, round(float(line["tokens"]) / float(line["tokens_per_second"] * line["step_seconds"])))
    except (KeyError, TypeError, ZeroDivisionError):
        return 0


def describe_missing(holes: Sequence[tuple[int, int]], torn: int) -> str:
    """The gaps in metrics.jsonl, in words; empty if there are none."""
    steps = ", ".join(f"{first:,} to {last:,}" if last > first else f"{first:,}" for first, last in holes)
    one = len(holes) == 1 and holes[0][0] == holes[0][1]
    parts = [f"no line for step{'' if one else 's'} {steps}"] if holes else []
    parts += [f"{counted(torn, 'torn line')} passed over"] if torn else []
    if parts:
        return f"metrics.jsonl: {', '.join(parts)}"
    return ""


def lost_lines(run_dir: Path, step: int) -> Iterator[str]:
    """A line where metrics.jsonl lacks steps up to `step`; to be asked before torn lines are dropped."""
    file = run_dir / "metrics.jsonl"
    lines, torn = (read_lines(file), torn_lines(file)) if file.exists() else ([], 0)
    earlier = [line for line in lines if isinstance(line.get("step"), int) and line["step"] <= step]
    if lost := describe_missing(missing_steps(earlier, step), torn):
        yield f"{run_dir}: {lost}; the report shows where"


# Of a receipt and an environment.
_SECTIONS = frozenset("parameters dtypes export batch optimizer data versions".split())
# What a line of each kind holds: numbers, which may be missing from an earlier release's, or null where not finite.
_NUMBERS = tuple(
    "step epoch loss grad_norm learning_rate supervised_tokens tokens step_seconds tokens_per_second "
    "data_wait_fraction peak_memory_gib peak_gib allocated_gib seconds perplexity".split()
)
_NEEDED = {
    "train": ("step", "tokens", "step_seconds", "peak_memory_gib"),
    "eval": ("step", "loss", "perplexity"),
    "phase": ("peak_gib",),
}


def is_as_written(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics has the values that a run writes, so that it can be drawn."""
    kind = line.get("kind")
    needed = _NEEDED.get(kind, ()) if isinstance(kind, str) else ("kind",) * ("kind" in line)
    values = (value for key, value in line.items() if key in _NUMBERS or key.endswith("_loss"))
    took = line.get("step_seconds")
    numbers = all(value is None or (isinstance(value, int | float) and type(value) is not bool) for value in values)
    step = line.get("step", 0)
    took_time = took is None or (isinstance(took, int | float) and took > 0)
    whole = took_time and type(step) is int and 0 <= step < 2**53 and isinstance(line.get("phase", ""), str)
    return numbers and whole and all(line.get(key) is not None for key in needed) and kind in (None, *_NEEDED)


def _is_sample(line: Mapping[str, Any]) -> bool:
    return all(isinstance(line.get(key), str) for key in ("when", "prompt", "answer"))


def _unusable(metrics: Path) -> int:
    """Lines that cannot be read, or with contents that no run writes."""
    if not metrics.is_file():
        return 0
    return torn_lines(metrics) + sum(not is_as_written(line) for line in read_lines(metrics))


def read_run(run_dir: Path, recipe: Recipe, *, merged: bool = False) -> RunFacts:
    """Read a run's folder; a missing file counts as empty. `merged`: describe its merged model."""

    def document(name: str) -> dict[str, Any]:
        path = run_dir / name
        content = read_object(path, MOST_RECORD_BYTES) if path.is_file() else {}
        for key in _SECTIONS & content.keys():
            if not isinstance(content[key], dict):
                what = f"{key} is {kind_of_value(content[key])}, where a run writes a section"
                raise unreadable(path, what, "take the file of the run itself")
        return content

    def lines(name: str, as_written: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        path = run_dir / name
        if path.is_file():
            return [line for line in read_lines(path) if as_written(line)]
        return []

    pictures = [name for name in ("loss.png", "memory.png") if (run_dir / name).is_file()]
    return RunFacts(
        recipe,
        document("receipt.json"),
        document("environment.json"),
        lines("metrics.jsonl", is_as_written),
        lines("samples.jsonl", _is_sample),
        pictures,
        document("run_state.json"),
        document("merged/merge.json") if merged else {},
        _unusable(run_dir / "metrics.jsonl"),
        document(EXPORT_RECORD),
    )
