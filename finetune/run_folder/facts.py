"""What model cards and reports show of a run, read from its folder. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.files import read_lines
from finetune.recipe.schema import Recipe


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

    @property
    def is_adapter(self) -> bool:
        """Whether the described model is an adapter, which needs its base model."""
        return self.recipe.lora is not None and not self.merged

    def evals(self) -> list[Mapping[str, Any]]:
        """Evaluations in the order of their steps; those without a finite loss are left out."""
        lines = [line for line in self.metrics if line.get("kind") == "eval" and line.get("loss") is not None]
        return sorted(lines, key=lambda line: line["step"])

    def exported_eval(self) -> Mapping[str, Any] | None:
        """The evaluation of the exported weights: of the step that the receipt names, else the last; None: none."""
        evals = self.evals()
        step = self.receipt.get("export", {}).get("step")
        return next((line for line in evals if line["step"] == step), evals[-1] if evals else None)

    def trained(self) -> list[Mapping[str, Any]]:
        return [line for line in self.metrics if line.get("kind") == "train"]

    def samples_by_prompt(self) -> dict[str, dict[str, Mapping[str, Any]]]:
        """prompt -> {"before": line, "after": line} of samples.jsonl, in the order in which prompts were asked."""
        answers: dict[str, dict[str, Mapping[str, Any]]] = {}
        for line in self.samples:
            answers.setdefault(str(line.get("prompt")), {})[str(line.get("when"))] = line
        return answers


def read_run(run_dir: Path, recipe: Recipe, *, merged: bool = False) -> RunFacts:
    """Read a run's folder; a missing file counts as empty. `merged`: describe its merged model."""

    def document(name: str) -> dict[str, Any]:
        path = run_dir / name
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def lines(name: str) -> list[dict[str, Any]]:
        path = run_dir / name
        return read_lines(path) if path.is_file() else []

    pictures = [name for name in ("loss.png", "memory.png") if (run_dir / name).is_file()]
    return RunFacts(
        recipe,
        document("receipt.json"),
        document("environment.json"),
        lines("metrics.jsonl"),
        lines("samples.jsonl"),
        pictures,
        document("run_state.json"),
        document("merged/merge.json") if merged else {},
    )
