"""`finetune rehearse`: the recipe end to end, small and on the CPU.

It trains four steps, kills the run before the last of them is saved, and resumes it. Losses and gradient norms must
repeat bitwise. Then it loads the export with the plain libraries.

Some kernels sum in any order, as a GPU's do. The receipt says so, and such a run repeats its losses to a tolerance. Its
state is bitwise all the same, as the checkpoint's hashes tell.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from finetune.errors import FinetuneError
from finetune.files import remove_folder
from finetune.launch.local_ranks import check_rank_count
from finetune.launch.watched_job import (
    StepFailed,
    TrainingJob,
    ended_by_signals,
    kill_all,
    relative_difference,
    started,
    wait_for_end,
    wait_until,
)
from finetune.output_stream import silenced
from finetune.probe.own_template import template_note
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy import strategy_of
from finetune.rehearse.changes import SAVED_AFTER, STEPS, changes, formats_of_gpus, layers_of, overrides, processes_of
from finetune.rehearse.load_back import load_back
from finetune.rehearse.shrink import shrink_model
from finetune.wording import counted

ROUNDING_OF_FLOAT32, ROUNDING_OF_HALF = 1e-4, 1e-2  # relative; bfloat16 rounds by 2^-9 = 2e-3, each sum of many
KILL_ATTEMPTS = 3  # on a busy machine the whole run may be over before the kill


@dataclass
class Checklist:
    """The steps so far: name, whether it passed, seconds, and what was seen."""

    log: Callable[[dict[str, Any]], None]
    steps: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int = 0

    @contextmanager
    def line(self, name: str) -> Iterator[dict[str, Any]]:
        """Time the block, which fills in `seen`. A StepFailed or FinetuneError becomes a line, then a StepFailed."""
        step: dict[str, Any] = {"name": name, "ok": False, "seconds": 0.0, "seen": ""}
        began = time.monotonic()
        self.steps.append(step)
        failed: StepFailed | None = None
        try:
            yield step
            step["ok"] = True
        except (StepFailed, FinetuneError) as error:
            failed = StepFailed(str(error), error.exit_code)
            step["seen"], self.exit_code = str(error), error.exit_code
        step["seconds"] = round(time.monotonic() - began, 1)
        self.log(step)
        if failed is not None:
            raise failed


def rehearse(
    recipe: Path, words: Sequence[str], *, processes: int = 2, log: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Rehearse and return the report; `log` gets each line of it as soon as it is known.

    The report's `exit_code` is 0, or that of the step that failed. Raises RecipeError for a wrong recipe.
    """
    page = load_recipe(recipe, words)
    loaded = page.recipe
    strategy = strategy_of(loaded)
    check_rank_count(processes, gpus=0)
    ranks = processes_of(strategy, processes)
    checklist, began = Checklist(log), time.monotonic()
    report: dict[str, Any] = {"recipe": str(recipe), "strategy": strategy.name, "processes": ranks, "differs": []}
    with tempfile.TemporaryDirectory(prefix="finetune-rehearsal-") as name, ended_by_signals(), suppress(StepFailed):
        folder = Path(name)
        with checklist.line("loads") as step:
            from finetune.probe.probe import probe  # with torch

            section = loaded.model
            look = template_note(loaded)
            probed = probe(loaded, offline=True)
            with silenced():
                model = shrink_model(
                    section.name_or_path,
                    section.revision,
                    loaded.data,
                    folder / "model",
                    section.new_tokens,
                    layers=layers_of(strategy, ranks),
                )
            recipe_changes = changes(loaded, strategy, model, processes=ranks, folder=folder)
            recipe_changes += formats_of_gpus(page)
            settings = (*words, *overrides(recipe_changes))
            small = load_recipe(recipe, settings).recipe
            step["seen"] = f"{model.architecture} of {model.parameters:,} parameters"
        report["probe"] = probed.as_json()
        report["differs"] = [change.note for change in recipe_changes if change.note]
        report["look"] = [look] if look else []
        for mark in ("look", "differs"):
            for note in report[mark]:
                log({mark: note})
        job = TrainingJob(recipe, settings, ranks, folder)
        receipt, uninterrupted = train_and_kill(job, checklist)
        with checklist.line("resumed the same") as step:
            with started(job) as process:
                wait_for_end(job, process)
            step["seen"] = same_curve(uninterrupted, job.curve(), tolerance=resume_tolerance(receipt))
        with checklist.line("exported") as step:
            step["seen"] = exported(job.run_dir)
        with checklist.line("loaded back") as step, silenced():
            step["seen"] = load_back(small, job.run_dir)
        report["receipt"] = receipt
    return report | {
        "ok": checklist.exit_code == 0,
        "exit_code": checklist.exit_code,
        "seconds": round(time.monotonic() - began, 1),
        "steps": checklist.steps,
    }


def train_and_kill(job: TrainingJob, checklist: Checklist) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Kill all processes of the job when the last step is logged; return the receipt and the curve up to there."""
    saved, last_saved = (job.run_dir / "checkpoints" / f"step-{step:08d}" for step in (SAVED_AFTER, STEPS))
    for attempts_left in reversed(range(KILL_ATTEMPTS)):
        with started(job) as process:
            with checklist.line(f"trains {STEPS} steps") as step:
                # A checkpoint has its name once its write in the background is complete.
                processes = wait_until(lambda: len(job.curve()) == STEPS and saved.is_dir(), job, process)
                receipt: dict[str, Any] = json.loads((job.run_dir / "receipt.json").read_text("utf-8"))
                step["seen"] = sharding(receipt)
            with checklist.line("killed unsaved") as step:
                killed = kill_all(process, processes)
                # On a busy machine the kill may come so late that only the run's pages were still to be written.
                state = (job.run_dir / "run_state.json").read_text("utf-8")
                if killed and json.loads(state)["state"] != "finished":
                    if not saved.is_dir():
                        raise StepFailed(f"no checkpoint of step {SAVED_AFTER} is there")
                    # The last steps are to be done again, so remove what was written of them meanwhile.
                    for folder in (last_saved, job.run_dir / "adapter", job.run_dir / "model"):
                        if folder.exists():
                            remove_folder(folder)
                    step["seen"] = f"SIGKILL to {counted(killed, 'process', 'processes')}; step {SAVED_AFTER} was saved"
                    return receipt, job.curve()
                if not attempts_left:
                    raise StepFailed(f"the run was over before the kill, {KILL_ATTEMPTS} times")
                step["seen"] = "the run was over before; once more"
        remove_folder(job.run_dir)
    raise AssertionError("the last attempt returns or raises")


def sharding(receipt: dict[str, Any]) -> str:
    """The strategy in force and a rank's share of the weights, in a line."""
    facts, world, dtypes = receipt["sharding"], receipt["world_size"], receipt["dtypes"]
    spread = "one process"
    if world > 1:
        spread = f"each rank holds {facts['held_share']:.0%} of the weights"
    if facts["mesh"]:
        spread += f", mesh {' x '.join(f'{count} {name}' for name, count in facts['mesh'].items())}"
    computed = f"{dtypes['master']} masters, {dtypes['compute']} compute"
    if line := receipt.get("formats", {}).get("line"):
        computed += f" ({line})"
    return f"{receipt['strategy']} on {world}: {spread}; {computed}"


def resume_tolerance(receipt: dict[str, Any]) -> float:
    """The largest relative difference allowed between losses and gradient norms before the kill and resumed.

    0 means bitwise. Two steps after equal states, sums in another order differ at most as the number format rounds.
    """
    if receipt["deterministic"]:
        return 0.0
    if receipt["dtypes"]["compute"] == "float32":
        return ROUNDING_OF_FLOAT32
    return ROUNDING_OF_HALF


def same_curve(uninterrupted: list[tuple[Any, ...]], resumed: list[tuple[Any, ...]], *, tolerance: float = 0.0) -> str:
    """Compare both curves, bit by bit or to a relative `tolerance`, and say which.

    Raises StepFailed with the first difference.
    """
    if len(uninterrupted) != STEPS or len(resumed) != STEPS:
        raise StepFailed(f"{len(uninterrupted)} steps were logged before the kill, {len(resumed)} by the resumed run")
    for before, after in zip(uninterrupted, resumed, strict=True):
        if any(relative_difference(*pair) > tolerance for pair in zip(after, before, strict=True)):
            distance = f", further apart than {tolerance:g}" if tolerance else ""
            values = f"loss, gradient norm {before[1:]} before the kill, {after[1:]} resumed"
            raise StepFailed(f"step {before[0]}: {values}{distance}")
    again = f"steps {SAVED_AFTER + 1} to {STEPS} again: loss and gradient norm"
    if not tolerance:
        return f"{again} bitwise"
    return f"{again} within {tolerance:g}: a GPU's kernels sum in any order; bitwise by training.deterministic=true"


def exported(run_dir: Path) -> str:
    """The exported files. Raises StepFailed if there are none, or others than safetensors."""
    folder = next((run_dir / name for name in ("adapter", "model") if (run_dir / name).is_dir()), None)
    if folder is None:
        raise StepFailed("neither adapter/ nor model/ was written")
    files = [path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pkl")]
    if not files or any(not name.endswith(".safetensors") for name in files):
        raise StepFailed(f"{folder.name}/ holds {', '.join(files) or 'no weights'}; safetensors alone were expected")
    return f"{folder.name}/{', '.join(sorted(files))}"


@contextmanager
def checklist_printer(*, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that prints each line of a rehearsal; the block's end prints the sum. Quiet: prints nothing."""
    console, began = Console(quiet=quiet, soft_wrap=True), time.monotonic()
    failed: list[str] = []

    def log(line: dict[str, Any]) -> None:
        if "differs" in line:
            console.print(Text(f"         differs: {line['differs']}", style="dim"))
            return
        if "look" in line:
            console.print(Text.assemble(("  look ", "yellow"), f"           {line['look']}"))
            return
        mark, style = ("ok", "green") if line["ok"] else ("FAILED", "red")
        text = Text.assemble((f"{mark:>6} ", style), f"{line['seconds']:6.1f} s  {line['name']:<20}  {line['seen']}")
        console.print(text)
        if not line["ok"]:
            failed.append(line["name"])

    yield log
    seconds = time.monotonic() - began
    console.print(f"rehearsed in {seconds:.0f} s" if not failed else f"failed in {seconds:.0f} s: {failed[0]}")
