"""The verbs of `finetune`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from finetune import __version__, planner
from finetune.cli import data_verbs, run_verbs, train_verbs
from finetune.cli.app import AsJson, Overrides, RecipeFile, app, name_next, run_verb, say, say_begun, ticking, user_path
from finetune.cli.downloads import download_lines
from finetune.cli.recipe_list import as_table, find_recipes
from finetune.errors import DoesNotFit, FinetuneError
from finetune.files import check_output
from finetune.launch.cpu_memory import bound_libraries, readable_threads
from finetune.launch.plan import LAUNCHERS, JobOptions, LaunchPlan, plan_launch
from finetune.launch.script import script, write_script
from finetune.output_stream import open_missing_streams, plain_output
from finetune.recipe.gpus import gpus_of
from finetune.recipe.loader import load_recipe
from finetune.recipe.mixed_precision import fastest_for
from finetune.recipe.optimizers import far_rate
from finetune.recipe.reference import write_generated
from finetune.recipe.resolved import resolved_yaml
from finetune.recipe.strategy_fit import refuse_recipe
from finetune.redaction import hide_in, hide_secrets, known_secrets


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"finetune {__version__}")
        raise typer.Exit


@app.callback()
def verbs(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Fine-tune language models: one YAML recipe, every strategy, the same curve.

    To train: finetune train RECIPE, or accelerate launch finetune/train.py RECIPE [key=value ...]
    """


def list_recipes(
    gpus: Annotated[str | None, typer.Option(help="Your GPUs: 2x24GB, 2x8x80GB, cpu.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="A model's name or size: 8b.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes, or those that fit your GPUs."""

    def work() -> dict[str, Any]:
        recipes = find_recipes(gpus, model)
        for reason in recipes.left_out:
            typer.echo(reason, err=True)
        if not as_json:
            typer.echo(recipes.hint or as_table(recipes.recipes))
        result = {"left_out": recipes.left_out, "hint": recipes.hint}
        return {"ok": True, "recipes": [listed.as_json() for listed in recipes.recipes], **result}

    run_verb(work, as_json=as_json)


def check(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            parser=user_path, metavar="RECIPE", help="A recipe file, or a name of `finetune list`.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    resolved: Annotated[bool, typer.Option(help="Print every value and where it came from.")] = False,
    data: Annotated[bool, typer.Option("--data", help="Check the rows of local data files too.")] = False,
    model: Annotated[
        bool, typer.Option("--model", help="Probe the model: are its loss and gradients right? No weights, no GPU.")
    ] = False,
    schema: Annotated[bool, typer.Option(help="Write recipe.schema.json and docs/recipe.md again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Is the recipe right? Every mistake at once, with its line."""
    if recipe is None and not schema:
        raise typer.BadParameter("name a recipe", param_hint="RECIPE")

    def work() -> dict[str, Any]:
        if recipe is None or schema:
            written = [str(path) for path in write_generated()]
            if not as_json:
                typer.echo("\n".join(written))
            return {"ok": True, "files": written}
        loaded = load_recipe(recipe, overrides or [], here=True)
        strategy = refuse_recipe(loaded.recipe)
        if loaded.recipe.quantization is not None:
            from finetune.model.known_configs import config_here
            from finetune.model.mixtures import refuse_mixture

            section = loaded.recipe.model
            refuse_mixture(loaded.recipe, strategy, config_here(section.name_or_path, section.revision))
        notes = [*strategy.notes]
        result: dict[str, Any] = {"ok": True, "path": str(recipe)}
        batch_notes: list[str] = []
        if data:
            say_begun("reading the rows, and tokenising some of them")
            from finetune.data.rows import check_rows
            from finetune.tokens.dataset import prepare_here
            from finetune.tokens.second_model import check_reference
            from finetune.training.batch_notes import notes_before_launch

            check_rows(loaded.recipe.data, notes.append, loaded.recipe.eval.generate)
            prepared, uncounted = prepare_here(loaded.recipe)
            if prepared is not None:
                notes += check_reference(loaded.recipe, [store.tokens for store in prepared.pool.stores])
                notes += [note for note in prepared.notes if note not in notes]
            result["batches"] = notes_before_launch(loaded.recipe, prepared, uncounted)
            batch_notes = result["batches"]["notes"]
        else:
            from finetune.model.known_configs import beyond_stated

            notes += [*far_rate(loaded.recipe), *beyond_stated(loaded.recipe)]
            if loaded.recipe.preferences is not None:
                from finetune.training.batch_notes import router_left_out

                notes += router_left_out(loaded.recipe)
        if model:
            from finetune.closed_form.recomputation import choose_recomputation
            from finetune.model.known_configs import config_if_known
            from finetune.probe.own_template import template_note
            from finetune.probe.probe import probe
            from finetune.tokens.second_model import check_reference

            if not data:  # whose reading of rows compares it too
                notes += check_reference(loaded.recipe)
            # Probe the layers as a run on the recipe's GPUs would recompute them.
            config = config_if_known(loaded.recipe.model)
            recomputation = choose_recomputation(loaded.recipe, config, gpus_of(loaded.recipe.budget))
            notes += [note for note in [template_note(loaded.recipe)] if note]
            probed = probe(recomputation.recipe, offline=True)
            notes += [line for line in (probed.line(), recomputation.line) if line]
            result |= {
                "probe": probed.as_json(),
                "recomputation": recomputation.facts,
                "rows": recomputation.rows_facts,
            }
        if not loaded.recipe.budget.gpus:
            formats = loaded.formats_for(fastest_for(0))[1]
            if formats.line:
                notes.append(f"{formats.line}; the start also times small products")
            if formats.facts:
                result["formats"] = formats.facts
        if loaded.recipe.training.activation_offloading:
            from finetune.closed_form.states_on_host import check_host_memory
            from finetune.model.known_configs import config_if_known

            gpus, config = loaded.recipe.budget.gpus, config_if_known(loaded.recipe.model)
            notes += check_host_memory(loaded.recipe, config, gpus or 1, pinned=gpus > 0, here=False)
        notes += download_lines(loaded.recipe)
        if notes or data:
            result["notes"] = notes
        text = f"{recipe}: right\n"
        if resolved:
            known = known_secrets()
            text = hide_secrets(resolved_yaml(loaded), known)
            values = {"recipe": loaded.recipe.model_dump(mode="json"), "origins": loaded.origins}
            result |= hide_in(values, known)
        if not as_json:
            typer.echo(text, nl=False)
            for note in [*batch_notes, *notes]:
                say(note, err=resolved)  # the user may write the resolved recipe into a file
            words = [str(recipe), *(overrides or [])]
            name_next(["finetune", "preview", *words], ["finetune", "plan", *words], ["finetune", "train", *words])
        return result

    run_verb(work, as_json=as_json)


def rehearse(
    recipe: RecipeFile,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=2, help="Ranks; one for single, at least four for hsdp.")] = 2,
    as_json: AsJson = False,
) -> None:
    """The whole run, small, on the CPU: train, kill, resume, export."""

    def work() -> dict[str, Any]:
        from finetune.closed_form.recomputation import chosen_words
        from finetune.rehearse.rehearsal import checklist_printer, rehearse

        # Resolve `auto` for the recipe's own GPUs. For the small model on this CPU it would choose something else.
        words = chosen_words(recipe, overrides or [])
        with checklist_printer(quiet=as_json) as log:
            result = rehearse(recipe, words, processes=processes, log=log)
        if result.get("ok") and not as_json:
            name_next(["finetune", "train", recipe, *(overrides or [])])
        return result

    run_verb(work, as_json=as_json)


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE]... [KEY=VALUE]...", help="A recipe, or several to compare.", show_default=False
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="2x24GB, 2x8x80GB, 8xH100, cpu; the recipe's budget.", show_default=False)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Machines with these GPUs each; 1.", show_default=False)
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option("--max", help="max_length or per_device_batch_size: how far it goes.", show_default=False),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Memory by component, operations, spare memory.")] = False,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Of one GPU for one hour: adds the cost.", show_default=False)
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="The arithmetic, in this recipe's figures.")] = False,
    model: Annotated[
        str | None, typer.Option(help="A Hub name or a folder: plan LoRA on it, or --pick.", show_default=False)
    ] = None,
    pick: Annotated[
        bool, typer.Option("--pick", help="Find the best settings for a recipe, or for --model, on --gpus.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("-o", "--output", parser=user_path, help="Write what was picked.", show_default=False)
    ] = None,
    audit: Annotated[bool, typer.Option("--audit", help="RUN [RUN ...]: their plans against measurements.")] = False,
    as_json: AsJson = False,
) -> None:
    """Will it fit? One GPU's memory by phase. Exit code 3: it does not."""

    def work() -> dict[str, Any]:
        if file is not None:
            check_output(file, "--output")
        options = planner.PlanOptions(gpus, nodes, largest, explain, details, price)
        with ticking() as note:
            if audit:
                result, text = planner.audit([user_path(word) for word in words or []], note)
            elif pick:
                result, text = planner.pick_in_words(words or [], model, options, file, note)
            else:
                result, text = planner.plan_in_words(words or [], options, model, note)
        if not as_json:
            say(text)
            if result.get("ok") and file is not None:
                name_next(["finetune", "check", file])
            elif result.get("ok") and not audit and not pick and words:
                name_next(["finetune", "train", *words])
        return result

    run_verb(work, as_json=as_json)


_STARTING_SECONDS = 1800  # the image's and the model's download, the first step, the push


def _planned_timeout(plan: LaunchPlan) -> str:
    """Twice the planned time of the run, and half an hour. Raises FinetuneError if no plan knows its time."""
    from finetune.launch.hf_jobs import flavour_of
    from finetune.training.batch_notes import notes_before_launch

    flavour, recipe = flavour_of(plan), plan.loaded.recipe
    unknown = ""
    if flavour.gpu not in planner.CHIPS:
        unknown = f"how fast {flavour.name} is"
    elif not (recipe.training.max_steps or notes_before_launch(recipe, ranks=plan.world).get("steps")):
        unknown = "how many steps the run has, before its data are here"
    if unknown:
        raise FinetuneError(f"--timeout: is missing, and no plan knows {unknown}; name it: --timeout 8h")
    gpus = planner.PlanOptions(gpus=f"{plan.gpus}x{flavour.gpu}")
    with ticking() as note:
        result, _ = planner.plan_in_words([plan.recipe, *plan.arguments], gpus, None, note)
    if not result["ok"]:
        raise DoesNotFit(f"budget: the recipe does not fit on {flavour.name}; see finetune plan {plan.recipe}")
    return f"{math.ceil((2 * result['run']['seconds'] + _STARTING_SECONDS) / 60)}m"


def launch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    on: Annotated[str, typer.Option(help=f"Who starts the ranks: {', '.join(LAUNCHERS)}.")] = "torchrun",
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines; the recipe's.", show_default=False)] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="0 is the CPU; the recipe's.", show_default=False)
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="A container's image: kubeflow, hf-jobs; slurm runs it by apptainer.", show_default=False),
    ] = None,
    claim: Annotated[
        str | None, typer.Option(help="Kubeflow: the volume's PersistentVolumeClaim.", show_default="finetune")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's.", show_default=False)] = None,
    timeout: Annotated[
        str | None, typer.Option(help="hf-jobs: 90m, 8h; twice the planned time.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-o", "--output", parser=user_path, help="Write it too.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the job, or the lines, that start the recipe elsewhere."""

    def work() -> dict[str, Any]:
        if file is not None:
            check_output(file, "--output")
        options = JobOptions(image, claim, partition, account, timeout)
        words = overrides or []
        plan = plan_launch(recipe, words, launcher=on, nodes=nodes, gpus_per_node=gpus_per_node, options=options)
        if on == "hf-jobs" and timeout is None:
            text = script(plan, _planned_timeout(plan))
        else:
            text = script(plan, timeout or "")
        if file is not None:
            write_script(file, text)
        if not as_json:
            typer.echo(text, nl=False)
        return {"ok": True, "nodes": plan.nodes, "processes": plan.world, "file": file and str(file), "script": text}

    run_verb(work, as_json=as_json)


# In the order of a user's way, which --help shows.
VERBS: dict[str, Callable[..., None]] = {
    "init": data_verbs.init,
    "check": check,
    "preview": data_verbs.preview,
    "plan": plan,
    "list": list_recipes,
    "rehearse": rehearse,
    "train": train_verbs.train,
    "compare": train_verbs.compare,
    "status": run_verbs.status,
    "report": run_verbs.report,
    "chat": run_verbs.chat,
    "eval": run_verbs.evaluate,
    "sample": run_verbs.sample,
    "merge": run_verbs.merge,
    "export": run_verbs.export,
    "push": run_verbs.push,
    "launch": launch,
    "import": data_verbs.import_recipe,
    "doctor": data_verbs.doctor,
}
for name, verb in VERBS.items():
    app.command(name)(verb)


# Verbs, and options of verbs, that went -> what to write instead.
_OWN_JOBS = "in a job array of your own, run finetune train RECIPE KEY=VALUE output_dir=DIR for each setting"
_REMOVED = {
    ("compare", "--strategies"): "write --vary accelerate_config=zero2,fsdp2",
    ("compare", "--array"): _OWN_JOBS,
    ("compare", "--only"): _OWN_JOBS,
    ("compare", "--processes"): "the recipe's budget says it: budget.gpus=N; on a CPU its strategy does",
    ("doctor", "--gpu"): "in a checkout: python benchmarks/gpu.py proofs",
    ("fetch", ""): "finetune check RECIPE prints the lines of `hf download` that bring model and data",
    ("import", "--prove"): "docs/parity.md compares this kit's steps with other tools'; import without it",
    ("sample", "--near"): "leave it out: one of the answers that share 90 % of their letter triples is kept",
    ("sample", "--without-held-out"): "leave it out: prompts that the recipe holds out are never asked",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the console's. Returns the exit code."""
    open_missing_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    if line := readable_threads():
        print(line, file=sys.stderr)
    for (verb, option), instead in _REMOVED.items():
        if words[:1] == [verb] and (not option or option in (word.partition("=")[0] for word in words)):
            line = f"{verb} {option}".rstrip() + f": is not there any more; {instead}"
            if "--json" in words:
                print(json.dumps({"ok": False, "exit_code": 2, "mistakes": [line]}))
            else:
                print(line, file=sys.stderr)
            return 2
    # Frames and lines broken at 80 columns are for a terminal. In a file or a pipe each message is one line, for grep.
    program = _program(words[0] if words else "", sys.stdout.isatty() and sys.stderr.isatty())
    try:
        with plain_output():
            if "--json" in words:
                return program(args=words, prog_name="finetune", standalone_mode=False) or 0
            program(args=words, prog_name="finetune")
    except _UsageError as error:  # with --json a mistake in the line itself is one JSON object too
        typer.echo(json.dumps({"ok": False, "exit_code": error.exit_code, "mistakes": [error.format_message()]}))
        return int(error.exit_code)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


@cache
def _program(verb: str, frames: bool) -> Any:
    """Return the program for a command line that begins with `verb`: to build one verb takes 5 ms, all take 75 ms."""
    commands = app.registered_commands
    part = copy(app)
    # A line that names no verb gets them all: --help, and what was meant.
    part.registered_commands = [command for command in commands if command.name == verb] or commands
    part.rich_markup_mode = "rich" if frames else None
    return typer.main.get_command(part)


# click's UsageError: typer has its own copy of click in newer versions, and a public name for this child alone.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


def console() -> NoReturn:
    """The console script."""
    bound_libraries()  # eval and chat run a model over ever-new lengths too
    code = main()
    if sys.argv[1:2] == ["plan"]:  # skip Python's clean-up, which frees a million objects one by one for a second
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    console()
