"""Metrics, answers and the report to trackers, through Accelerate's own classes.

No training ends because of a tracker: a failing tracker is reported once and disabled. Nothing goes to the network
unless the user's own settings send it there: wandb without a key stays offline, the others write files.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from finetune.files import write_json
from finetune.recipe.resolved import leaves
from finetune.recipe.schema import Recipe, Tracker
from finetune.recipe.yaml_text import dotted

PROJECT = "finetune"
IDENTITIES = "trackers.json"  # in the run's folder: the trackers' names of the run, by which a resumed one continues
NO_METRICS = ("kind", "step")
REPORT = ("report.html", "loss.png", "rewards.png", "memory.png")


@dataclass(frozen=True)
class _TrackedRun:
    """The run's identity in a tracker."""

    folder: Path
    first_step: int  # 0: not resumed
    identities: dict[str, str]  # by tracker

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Trackers:
    """The trackers of a recipe, on the main process; a failing one is reported and disabled."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._open: dict[str, _Tracker] = {}

    def start(self, first_step: int) -> None:
        """Open them; after the Accelerator is made, because Accelerate's classes ask it for the main process."""
        if not self._recipe.report_to:
            return
        folder = Path(self._recipe.run_dir)
        identities: dict[str, str] = {}
        if first_step and (folder / IDENTITIES).is_file():
            identities = json.loads((folder / IDENTITIES).read_text("utf-8"))
        run = _TrackedRun(folder, first_step, identities)
        settings = dict(tracked_settings(self._recipe.model_dump(mode="json")))
        for name in self._recipe.report_to:
            with self._guarded(name):
                self._open[name] = tracker = _TRACKERS[name](run)
                if not first_step:
                    tracker.accelerate.store_init_configuration(settings)
        write_json(folder / IDENTITIES, run.identities)

    def log(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: its numbers as train/loss, eval/loss, memory/forward_peak_gib."""
        values = dict(metric_values(line))
        if values:
            self._each(lambda tracker: tracker.accelerate.log(values, step=int(line["step"])))

    def log_samples(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines of samples.jsonl, all from one moment."""
        if lines:
            self._each(lambda tracker: tracker.log_samples(lines, int(lines[0]["step"])))

    def finish(self) -> None:
        """Log the run's report and close them."""
        files = [file for name in REPORT if (file := Path(self._recipe.run_dir) / name).is_file()]
        self._each(lambda tracker: tracker.log_report(files))
        self._each(lambda tracker: tracker.accelerate.finish())
        self._open.clear()

    def _each(self, call: Callable[[_Tracker], object]) -> None:
        for name, tracker in list(self._open.items()):
            with self._guarded(name):
                call(tracker)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # trackio prints its own messages
                yield
        except Exception as error:  # trackers may raise anything
            self._open.pop(name, None)
            problem = f"{type(error).__name__}: {error}"
            print(f"report_to: {name} failed and is disabled for the rest of this run: {problem}")


def tracked_settings(values: Mapping[str, Any]) -> Iterator[tuple[str, str | int | float | bool]]:
    """Nested settings as training.learning_rate; a value that is neither a number nor text is its JSON."""
    for path, value in leaves(values, lists="none"):
        if value != {}:
            yield dotted(path), value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


def metric_values(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A metrics.jsonl line's numbers, named train/loss; for phases rank 0's peak."""
    if line["kind"] == "phase":
        if line["rank"] == 0:
            yield f"memory/{line['phase']}_peak_gib", float(line["peak_gib"])
        return
    for key, value in line.items():
        if key not in NO_METRICS and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{line['kind']}/{key}", float(value)


class _TensorBoard:
    """Event files next to the metrics."""

    def __init__(self, run: _TrackedRun) -> None:
        # Steps after the checkpoint that a killed run resumes from are written again.
        purge = {"purge_step": run.first_step + 1} if run.first_step else {}
        self.accelerate: Any = TensorBoardTracker("tensorboard", str(run.folder), **purge)
        self.accelerate.start()

    def log_samples(self, lines: Sequence[Mapping[str, Any]], step: int) -> None:
        texts = [f"**{line['prompt']}**\n\n{line['answer']}" for line in lines]
        self.accelerate.log({f"samples/{index}": text for index, text in enumerate(texts)}, step=step)

    def log_report(self, files: Sequence[Path]) -> None:
        from matplotlib.image import imread

        for file in files:
            if file.suffix == ".png":
                image = imread(file)[None, :, :, :3]  # [1, height, width, RGB]
                self.accelerate.log_images({f"report/{file.stem}": image}, step=0, dataformats="NHWC")


class _Trackio:
    """A database in the user's Hugging Face cache."""

    def __init__(self, run: _TrackedRun) -> None:
        resume = "allow" if run.first_step else "never"
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self.accelerate: Any = TrackioTracker(PROJECT, name=run.name, resume=resume, **quiet)
        self.accelerate.start()

    def log_samples(self, lines: Sequence[Mapping[str, Any]], step: int) -> None:
        import pandas
        import trackio

        frame = pandas.DataFrame([{"prompt": line["prompt"], "answer": line["answer"]} for line in lines])
        self.accelerate.log({f"samples/{lines[0]['when']}": trackio.Table(dataframe=frame)}, step=step)

    def log_report(self, files: Sequence[Path]) -> None:
        import trackio

        for file in files:
            if file.suffix == ".png":
                self.accelerate.log({f"report/{file.stem}": trackio.Image(str(file))})


class _Wandb:
    """Offline files, unless the user has a key or set WANDB_MODE."""

    def __init__(self, run: _TrackedRun) -> None:
        import wandb

        offline = {}
        if not (os.environ.get("WANDB_MODE") or _has_wandb_key()):
            offline = {"mode": "offline"}
        self.accelerate: Any = WandBTracker(
            os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.identities.setdefault("wandb", secrets.token_hex(4)),
            resume="allow" if run.first_step else None,
            dir=str(run.folder),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
            **offline,
        )
        self.accelerate.start()

    def log_samples(self, lines: Sequence[Mapping[str, Any]], step: int) -> None:
        rows = [[line["prompt"], line["answer"]] for line in lines]
        self.accelerate.log_table(f"samples/{lines[0]['when']}", columns=["prompt", "answer"], data=rows, step=step)

    def log_report(self, files: Sequence[Path]) -> None:
        import wandb

        for file in files:
            media = wandb.Html(str(file)) if file.suffix == ".html" else wandb.Image(str(file))
            self.accelerate.log({f"report/{file.stem}": media})


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class _MLflow:
    """A database in the run's folder, unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, run: _TrackedRun) -> None:
        self._folder = run.folder.resolve()
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{self._folder / 'mlflow.db'}")
        # Accelerate creates a new experiment with this place for its files; a user's own server chooses its own.
        local = str(self._folder) in os.environ["MLFLOW_TRACKING_URI"]
        files = (self._folder / "mlflow").as_uri() if local else None
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        known = run.identities.get("mlflow")
        self.accelerate: Any = MLflowTracker(PROJECT, logging_dir=files, run_id=known, run_name=run.name)
        self.accelerate.start()
        run.identities["mlflow"] = self.accelerate.tracker.info.run_id

    def log_samples(self, lines: Sequence[Mapping[str, Any]], step: int) -> None:
        self.accelerate.log_artifact(str(self._folder / "samples.jsonl"))

    def log_report(self, files: Sequence[Path]) -> None:
        for file in files:
            self.accelerate.log_artifact(str(file))


_Tracker = _TensorBoard | _Trackio | _Wandb | _MLflow
_TRACKERS: dict[Tracker, type[_Tracker]] = {
    "tensorboard": _TensorBoard, "trackio": _Trackio, "wandb": _Wandb, "mlflow": _MLflow
}  # fmt: skip
