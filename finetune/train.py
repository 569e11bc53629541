"""The trainer entrypoint: `accelerate launch finetune/train.py RECIPE [key=value ...]`, or `finetune train RECIPE ...`.

A training has five parts. Each is one function. The first four return one frozen object for the next:

    refuse    settings, launch, machine                    Checked   training/start.py
    choose    every `auto`, base, tokenizer, probe         Choices
    prepare   rows, steps, the claim on the run folder     Start
    build     model, optimizer, receipt                    Built     training/session.py
    train     worst step, loop, export                     exit code

The report and the push come last, and read only the run's folder. However the run ends, run_state.json there says how.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # run as a file: this folder must not be the first place to import from
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetune.errors import STOPPED, EnvironmentMismatch, FinetuneError, NoRendezvous
from finetune.output_stream import keep_printing, one_line, open_missing_streams, wrapped
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy_fit import refuse_secrets

if TYPE_CHECKING:
    from finetune.launch.launcher import Launch
    from finetune.recipe.resolved import LoadedRecipe
    from finetune.recipe.schema import Recipe

USAGE = (
    "usage: accelerate launch finetune/train.py RECIPE [key=value ...]\n   or: finetune train RECIPE [key=value ...]"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the recipe named first, with overrides after it. Returns the exit code (0, 2, 3, 4 or 130)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        if arguments:
            return 0
        return 2
    from finetune.library_errors import library_errors

    try:
        with library_errors():
            refuse_deleted_folder()
            loaded = load_recipe(arguments[0], arguments[1:], here=True)
            announce(loaded.recipe)
            launch = set_up_process(loaded.recipe)
            return run_training(loaded, launch)
    except FinetuneError as error:
        # All ranks fail alike, and one of them prints. If they did not find each other, one on each machine prints.
        which = "LOCAL_RANK" if isinstance(error, NoRendezvous) else "RANK"
        from finetune.launch.launcher import repeat_after_launcher, speaks_for_ranks

        if speaks_for_ranks(which):
            print(error, file=sys.stderr, flush=True)
            repeat_after_launcher(str(error))
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"\n{str(error) or STOPPED}", file=sys.stderr)  # Python's own interrupt has no text
        return 130


def run_training(loaded: LoadedRecipe, launch: Launch) -> int:
    """Train from a loaded recipe to the report and the push. Returns the exit code: 0, or 130 after a signal."""
    from finetune.training.run_output import RunOutput
    from finetune.training.session import build, session, train
    from finetune.training.start import choose, prepare, refuse

    checked = refuse(loaded, launch)
    choices = choose(checked)
    start = prepare(choices)
    code = 0
    recipe, steps, silent = choices.recipe, start.plan.total_steps, not launch.is_main
    with RunOutput(recipe, steps, silent=silent, writes=start.writes, mirror=start.mirror) as output:
        with session(start, output) as opened:
            if opened is not None:  # else this run is finished already
                code = train(build(opened))
        # The process group has ended, so no rank waits while rank 0 writes the report.
        if start.writes:
            from finetune.report.run_page import write_pages

            write_pages(Path(recipe.run_dir), print)
    if code == 0 and recipe.hub.push and launch.is_main:
        from finetune.hub.around_training import push_after_training

        push_after_training(recipe)
    return code


def refuse_deleted_folder() -> None:
    """Raise EnvironmentMismatch if the current folder was deleted. MKL would end it with a line about torch."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise EnvironmentMismatch("the folder that this shell is in was deleted; cd to another one") from None


def announce(recipe: Recipe) -> None:
    """Print the first line on the first rank. Importing torch comes later and takes seconds to minutes."""
    from finetune.launch.launcher import speaks_for_ranks

    if not speaks_for_ranks():
        return
    method = "all weights" if recipe.lora is None else "adapters"
    line = f"{recipe.model.name_or_path}: training {method}, into {recipe.run_dir}; importing torch ..."
    print(wrapped(one_line(line), sys.stdout), flush=True)


def set_up_process(recipe: Recipe) -> Launch:
    """Set what libraries read when they are imported, and find out how this process was launched."""
    from finetune.launch.signals import die_with_launcher

    die_with_launcher()  # before importing torch, because that takes minutes for a hundred ranks
    for library in ("bitsandbytes", "torchao", "matplotlib"):  # at import they log missing kernels
        logging.getLogger(library).setLevel(logging.ERROR)
    from finetune.launch.cpu_memory import bound_libraries, readable_threads
    from finetune.launch.gpu_environment import set_gpu_environment, share_compile_workers

    bound_libraries()  # this call and the next must come before torch loads
    set_gpu_environment(deterministic=recipe.training.deterministic)
    from finetune.launch.launcher import read_launch, under_launcher

    if "SLURM_PROCID" in os.environ and not under_launcher():
        from finetune.launch.slurm import slurm_ranks

        os.environ |= slurm_ranks(os.environ)
    from finetune.measure.host_memory import cores_each

    launch = read_launch()
    share_compile_workers(cores_each(launch.local_world_size, launch.words))
    from finetune.strategies.accelerator import silence_libraries

    if (line := readable_threads()) and launch.is_main:
        print(line, file=sys.stderr)
    refuse_secrets(recipe)
    silence_libraries(launch)  # before the libraries that log at their import
    return launch


def process_main(argv: Sequence[str] | None = None) -> int:
    """`main` as a whole process, perhaps one of several ranks. Returns the exit code."""
    from finetune.launch.signals import stopped_by_signals

    open_missing_streams()
    keep_printing()
    with stopped_by_signals():
        code = main(argv)
        if code not in (0, 130):  # a launcher kills all ranks when one ends, but rank 0 must print the error first
            from finetune.launch.launcher import RANK_0_SECONDS, speaks_for_ranks

            if not speaks_for_ranks():
                time.sleep(RANK_0_SECONDS)
        return code


if __name__ == "__main__":
    sys.exit(process_main())
