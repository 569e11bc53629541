"""The trainer entrypoint: `accelerate launch finetune/train.py RECIPE [key=value ...]`, or `finetune train RECIPE ...`.

Reads the recipe, refuses what would not run as asked, prepares the data before any process group waits, and starts the
session. However the run ends, run_state.json in its folder says how.
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

from finetune.errors import STOPPED, FinetuneError, NoRendezvous
from finetune.output_stream import keep_printing, one_line
from finetune.recipe.loader import load_recipe
from finetune.recipe.resolved import LoadedRecipe, resolved_yaml
from finetune.recipe.sections.engine_keys import engine_notes

if TYPE_CHECKING:
    from finetune.closed_form.recomputation import Chosen
    from finetune.hub.start_adapter import StartAdapter
    from finetune.launch.launcher import Launch
    from finetune.recipe.schema import Recipe
    from finetune.recipe.strategy import Strategy
    from finetune.run_folder.folder import Claim
    from finetune.tokens.dataset import Prepared
    from finetune.training.batch_plan import BatchPlan

RANK_0_SECONDS = 10  # ranks that share a busy machine reach the same error within seconds of each other
USAGE = (
    "usage: accelerate launch finetune/train.py RECIPE [key=value ...]\n   or: finetune train RECIPE [key=value ...]"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the recipe named first, with overrides after it. Returns the exit code (0, 2, 3, 4 or 130)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    from finetune.untrusted.library_words import segments_explained

    try:
        with segments_explained():
            return run_recipe(load_recipe(arguments[0], arguments[1:], here=True))
    except FinetuneError as error:
        # All ranks fail alike, and one of them prints; where they did not find each other, one on each machine.
        which = "LOCAL_RANK" if isinstance(error, NoRendezvous) else "RANK"
        from finetune.launch.launcher import repeat_after_launcher, speaks_for_ranks

        if speaks_for_ranks(which):
            print(error, file=sys.stderr, flush=True)
            repeat_after_launcher(str(error))
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"\n{str(error) or STOPPED}", file=sys.stderr)  # with words at a second Ctrl-C; a first one ends a start
        return 130


def announce(recipe: Recipe) -> None:
    """Print the first line on the first rank. Importing torch comes later and takes seconds to minutes."""
    from finetune.launch.launcher import speaks_for_ranks

    if not speaks_for_ranks():
        return
    method = "all weights" if recipe.lora is None else "adapters"
    line = f"{recipe.model.name_or_path}: training {method}, into {recipe.run_dir}; importing torch ..."
    print(one_line(line), flush=True)


def run_recipe(loaded: LoadedRecipe) -> int:
    """Train to the end, or to a signal; returns 0 or 130. Raises FinetuneError."""
    from finetune.launch.signals import StopRequest, die_with_launcher

    announce(loaded.recipe)
    die_with_launcher()  # before importing torch, because that takes minutes for a hundred ranks
    for library in ("bitsandbytes", "torchao"):  # log missing optional kernels when they are imported
        logging.getLogger(library).setLevel(logging.ERROR)
    from finetune.launch.cpu_memory import bound_libraries
    from finetune.launch.gpu_environment import set_gpu_environment

    bound_libraries()  # before torch loads, and so the next
    set_gpu_environment(deterministic=loaded.recipe.training.deterministic)
    from finetune.hub.around_training import check_before_training, push_after_training, refuse_secrets
    from finetune.hub.start_adapter import find_start_adapter
    from finetune.launch.launcher import continue_command, read_launch, under_launcher
    from finetune.launch.slurm import slurm_ranks

    if not under_launcher():
        os.environ |= slurm_ranks(os.environ)
    from finetune.strategies.accelerator import check_launch, launch_notes, silence_libraries

    launch = read_launch()
    refuse_secrets(loaded.recipe)
    silence_libraries(launch)
    from finetune.architecture import attention
    from finetune.model.build import attention_name, load_tokenizer
    from finetune.model.optimizer import learning_rate_schedule
    from finetune.probe.probe import probe
    from finetune.strategies.accelerator import device_of
    from finetune.tokens.dataset import prepare
    from finetune.training.batch_notes import batch_notes
    from finetune.training.formats import choose_formats, slow_formats_note
    from finetune.training.run import check_best
    from finetune.training.session import train_and_report
    from finetune.training.start import Start
    from finetune.training.trackers import check_trackers

    loaded, formats = choose_formats(loaded, launch)
    recipe = loaded.recipe
    command = continue_command(launch, resume=recipe.training.resume)
    strategy = check_launch(recipe, launch)
    check_trackers(recipe)
    idle = [*strategy.notes, *engine_notes(strategy.section("deepspeed_config"), recipe.training.mixed_precision)]
    notes = [*launch_notes(launch, strategy), *idle, *check_before_training(recipe)]
    if launch.is_main and (slow := slow_formats_note(recipe, device_of(launch))):
        notes.append(slow)
    for note in notes if launch.is_main else ():
        print(note, file=sys.stderr)
    tokenizer = load_tokenizer(recipe)
    chosen = _chosen_recomputation(recipe, launch)
    recipe = chosen.recipe
    probed = probe(recipe, device_of(launch))
    adapter = find_start_adapter(recipe)
    prepared = prepare(recipe, tokenizer)
    flat = attention_name(recipe) == attention.NAME
    plan = _plan(recipe, strategy, launch, prepared, flat=flat)
    learning_rate_schedule(recipe.training, plan.total_steps)  # raises before the folder is made
    check_best(recipe, plan.total_steps)
    claim = _claim(loaded, prepared, adapter, command) if launch.is_main else None
    if claim is not None and claim.status != "finished":
        print(*batch_notes(recipe, prepared, plan), sep="\n", flush=True)
    found = probed.as_json(), chosen.facts, formats
    start = Start(recipe, launch, strategy, tokenizer, prepared, plan, adapter, claim, StopRequest(), *found)
    code = train_and_report(start)
    if code == 0 and launch.is_main:
        push_after_training(recipe)
    return code


def _plan(recipe: Recipe, strategy: Strategy, launch: Launch, prepared: Prepared, *, flat: bool) -> BatchPlan:
    """This rank's share of every step; the stages of a pipeline share one, in micro-batches of one width."""
    from finetune.training.batch_plan import one_width, plan_batches

    width = None
    if strategy.schedule is not None:
        sets = [rows for rows in (prepared.train, prepared.eval) if rows is not None]
        width = one_width(recipe.training.per_device_batch_size, sets)
    return plan_batches(
        recipe,
        len(prepared.train),
        world_size=launch.world_size,
        rank=launch.rank,
        flat=flat,
        stages=strategy.stage_count(launch.world_size),
        width=width,
    )


def _chosen_recomputation(recipe: Recipe, launch: Launch) -> Chosen:
    """For this rank's own device; the ranks agree on the most that one of them chooses (training/session.py)."""
    from finetune.closed_form.recomputation import choose_recomputation
    from finetune.measure.out_of_memory import memory_of
    from finetune.recipe.gpus import Gpus
    from finetune.strategies.accelerator import device_of

    device, ranks = device_of(launch), launch.local_world_size
    found = Gpus(ranks, memory_of(device).total, "GPU", launch.nodes) if device.type == "cuda" else None
    return choose_recomputation(recipe, found, ranks=ranks)


def _claim(loaded: LoadedRecipe, prepared: Prepared, adapter: StartAdapter | None, command: str) -> Claim:
    """Rank 0 locks the run's folder, and writes into it what is known at the start."""
    from finetune.files import write_json, write_text
    from finetune.measure.environment import environment
    from finetune.run_folder.folder import claim_run_folder, curve_identity
    from finetune.run_folder.longer import Asked
    from finetune.untrusted.model_code import trust_code

    recipe = loaded.recipe
    identity = curve_identity(recipe) | {"data fingerprint": prepared.fingerprint}
    identity |= {"adapter fingerprint": adapter.sha256} if adapter else {}
    claim = claim_run_folder(
        Path(recipe.run_dir),
        resume=recipe.training.resume,
        identity=identity,
        command=command,
        asked=Asked(recipe.training, len(prepared.train)),
    )
    for note in claim.notes:
        print(note, file=sys.stderr)
    if claim.status != "finished":
        folder = Path(loaded.recipe.run_dir)
        write_text(folder / "recipe.yaml", resolved_yaml(loaded))
        write_json(folder / "environment.json", environment())
    if recipe.model.trust_remote_code:
        trust_code(recipe.model.name_or_path, recipe.model.revision)
    return claim


def _wait_for_rank_0(code: int) -> int:
    """Have other ranks end after rank 0: a launcher kills all ranks when one ends, and rank 0 prints the error."""
    if code not in (0, 130):
        from finetune.launch.launcher import speaks_for_ranks

        if not speaks_for_ranks():
            time.sleep(RANK_0_SECONDS)
    return code


def process_main(argv: Sequence[str] | None = None) -> int:
    """`main` as the work of a whole process, perhaps one of several ranks. Returns the exit code."""
    from finetune.launch.signals import stopped_by_signals

    keep_printing()
    with stopped_by_signals():
        return _wait_for_rank_0(main(argv))


if __name__ == "__main__":
    sys.exit(process_main())
