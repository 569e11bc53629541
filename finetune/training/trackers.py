"""Metrics, answers and the report to trackers, through Accelerate's own classes.

A tracker serves the training, never the other way round: one that fails is told of once and let go. Nothing goes to
the network that the user's own settings do not send there: wandb without a key stays offline, the others write files.
"""

from __future__ import annotations

import importlib.util
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

from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from finetune.errors import EnvironmentMismatch
from finetune.files import write_json
from finetune.recipe.flat import leaves
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_text import dotted

PROJECT = "finetune"
MEMORY = "trackers.json"  # in the run's folder: names by which a resumed run is continued
SECTIONS = {"train": "train", "eval": "eval"}
LEFT_OUT = ("kind", "step")
Log = Callable[[str], None]


@dataclass(frozen=True)
class _Place:
    """Which run is tracked."""

    folder: Path
    first_step: int  # 0: not resumed
    names: dict[str, str]  # of an earlier start

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def check_trackers(recipe: Recipe) -> None:
    """Whether all that the recipe reports to is installed. Raises EnvironmentMismatch."""
    for name in recipe.report_to:
        if importlib.util.find_spec(name) is None:
            raise EnvironmentMismatch(f"report_to: {name} is not installed; pip install {name}, or take it away")


class Trackers:
    """Those of a recipe, on the main process."""

    def __init__(self, recipe: Recipe, log: Log = print) -> None:
        self._recipe = recipe
        self._log = log
        self._live: dict[str, GeneralTracker] = {}

    def start(self, first_step: int) -> None:
        """Open them; after the Accelerator is made, because they ask it for the main process."""
        if not self._recipe.report_to:
            return
        folder = Path(self._recipe.run_dir)
        place = _Place(folder, first_step, _remembered(folder) if first_step else {})
        settings = dict(_flat(self._recipe.model_dump(mode="json")))
        for name in self._recipe.report_to:
            with self._guarded(name):
                tracker = OPEN[name](place)
                tracker.start()
                self._live[name] = tracker
                if not first_step:
                    tracker.store_init_configuration(settings)
                if name == "mlflow":
                    place.names[name] = tracker.tracker.info.run_id
        write_json(folder / MEMORY, place.names)

    def log(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: its numbers as train/loss, eval/loss, memory/forward_peak_gib."""
        values = dict(_numbers(line))
        if values:
            self._each(lambda name, tracker: tracker.log(values, step=int(line["step"])))

    def log_samples(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Lines of samples.jsonl, all of one moment."""
        if lines:
            self._each(lambda name, tracker: SAMPLES[name](tracker, lines, Path(self._recipe.run_dir)))

    def finish(self) -> None:
        """Hand over the report and close them."""
        folder = Path(self._recipe.run_dir)
        self._each(lambda name, tracker: REPORT[name](tracker, folder))
        self._each(lambda name, tracker: tracker.finish())
        self._live.clear()

    def _each(self, do: Callable[[str, GeneralTracker], object]) -> None:
        for name, tracker in list(self._live.items()):
            with self._guarded(name):
                do(name, tracker)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # trackio tells of itself
                yield
        except Exception as error:  # theirs to raise what they like
            self._live.pop(name, None)
            self._log(f"report_to: {name} failed and is left out from here on: {type(error).__name__}: {error}")


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, str | int | float | bool]]:
    """Nested settings as training.learning_rate; a value that is neither a number nor text is its JSON."""
    for path, value in leaves(values, lists="none"):
        if value != {}:
            yield dotted(path), value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if line["kind"] == "phase":
        if line["rank"] == 0:
            yield f"memory/{line['phase']}_peak_gib", float(line["peak_gib"])
        return
    for key, value in line.items():
        if key not in LEFT_OUT and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{SECTIONS.get(line['kind'], line['kind'])}/{key}", float(value)


def _remembered(folder: Path) -> dict[str, str]:
    file = folder / MEMORY
    return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}


def _tensorboard(place: _Place) -> GeneralTracker:
    # What a killed run wrote after the checkpoint it resumes from is written again.
    again = {"purge_step": place.first_step + 1} if place.first_step else {}
    return TensorBoardTracker("tensorboard", str(place.folder), **again)


def _trackio(place: _Place) -> GeneralTracker:
    resume = "allow" if place.first_step else "never"
    return TrackioTracker(PROJECT, name=place.name, resume=resume, embed=False, auto_log_cpu=False, auto_log_gpu=False)


def _wandb(place: _Place) -> GeneralTracker:
    import wandb

    identity = place.names.setdefault("wandb", secrets.token_hex(4))
    offline = {} if os.environ.get("WANDB_MODE") or _wandb_key() else {"mode": "offline"}
    settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
    return WandBTracker(
        os.environ.get("WANDB_PROJECT", PROJECT),
        name=place.name,
        id=identity,
        resume="allow" if place.first_step else None,
        dir=str(place.folder),
        settings=settings,
        **offline,
    )


def _wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _mlflow(place: _Place) -> GeneralTracker:
    folder = place.folder.resolve()
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    # Accelerate makes the experiment when it is new; where the user's own server keeps files is its affair.
    ours = str(folder) in os.environ["MLFLOW_TRACKING_URI"]
    files = (folder / "mlflow").as_uri() if ours else None
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return MLflowTracker(PROJECT, logging_dir=files, run_id=place.names.get("mlflow"), run_name=place.name)


def _text(line: Mapping[str, Any]) -> str:
    return f"**{line['prompt']}**\n\n{line['answer']}"


def _samples_as_text(tracker: GeneralTracker, lines: Sequence[Mapping[str, Any]], _: Path) -> None:
    texts = {f"samples/{index}": _text(line) for index, line in enumerate(lines)}
    tracker.log(texts, step=int(lines[0]["step"]))


def _samples_as_table(tracker: Any, lines: Sequence[Mapping[str, Any]], _: Path) -> None:
    rows = [[line["prompt"], line["answer"]] for line in lines]
    tracker.log_table(
        f"samples/{lines[0]['when']}", columns=["prompt", "answer"], data=rows, step=int(lines[0]["step"])
    )


def _samples_to_trackio(tracker: GeneralTracker, lines: Sequence[Mapping[str, Any]], _: Path) -> None:
    import pandas
    import trackio

    frame = pandas.DataFrame([{"prompt": line["prompt"], "answer": line["answer"]} for line in lines])
    tracker.log({f"samples/{lines[0]['when']}": trackio.Table(dataframe=frame)}, step=int(lines[0]["step"]))


def _samples_as_file(tracker: Any, _: Sequence[Mapping[str, Any]], folder: Path) -> None:
    tracker.log_artifact(str(folder / "samples.jsonl"))


def _existing(folder: Path) -> list[Path]:
    return [folder / name for name in ("report.html", "loss.png", "memory.png") if (folder / name).is_file()]


def _report_as_files(tracker: Any, folder: Path) -> None:
    for file in _existing(folder):
        tracker.log_artifact(str(file))


def _report_to_wandb(tracker: Any, folder: Path) -> None:
    import wandb

    for file in _existing(folder):
        kind = wandb.Html(str(file)) if file.suffix == ".html" else wandb.Image(str(file))
        tracker.log({f"report/{file.stem}": kind})


def _report_as_pictures(tracker: Any, folder: Path) -> None:
    from matplotlib.image import imread

    pictures = {
        f"report/{file.stem}": imread(file)[None, :, :, :3] for file in _existing(folder) if file.suffix == ".png"
    }
    for name, picture in pictures.items():
        tracker.log_images({name: picture}, step=0, dataformats="NHWC")


def _report_to_trackio(tracker: GeneralTracker, folder: Path) -> None:
    import trackio

    for file in _existing(folder):
        if file.suffix == ".png":
            tracker.log({f"report/{file.stem}": trackio.Image(str(file))})


OPEN: dict[str, Callable[[_Place], GeneralTracker]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
SAMPLES: dict[str, Callable[[GeneralTracker, Sequence[Mapping[str, Any]], Path], None]] = {
    "tensorboard": _samples_as_text,
    "trackio": _samples_to_trackio,
    "wandb": _samples_as_table,
    "mlflow": _samples_as_file,
}
REPORT: dict[str, Callable[[GeneralTracker, Path], None]] = {
    "tensorboard": _report_as_pictures,
    "trackio": _report_to_trackio,
    "wandb": _report_to_wandb,
    "mlflow": _report_as_files,
}
