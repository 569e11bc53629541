"""`finetune plan`: from a recipe's file to its output. Heavy imports come late: mistakes are reported at once."""

from __future__ import annotations

import gc
import io
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.rank import cached_strategy
from finetune.closed_form.recomputation import choose_recomputation
from finetune.errors import DoesNotFit, EnvironmentMismatch, FinetuneError
from finetune.measure.units import GIB
from finetune.model.known_configs import planned_config
from finetune.planner import candidates, remedies
from finetune.planner.arithmetic import explain_plan
from finetune.planner.remedies import changed
from finetune.recipe.gpus import Gpus, gpus_of, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.mixed_precision import fastest_for
from finetune.recipe.schema import Recipe
from finetune.wording import counted

if TYPE_CHECKING:
    from finetune.planner.plan_recipe import Plan
    from finetune.tokens.batches import MicroBatch

TRIES = 3  # variants that are planned if they certainly fit by the closed form
TRACED, TRACES = 1, 3  # changes that make a recipe fit: so many shown ones are traced, with so many traces at most
ALMOST_FULL = 0.95  # rows that hold this share of their tokens count as full: estimates have three figures
Output = tuple[dict[str, Any], str]
Note = Callable[[str], None]  # receives progress lines of steps that take seconds


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line."""

    gpus: str | None = None
    nodes: int | None = None
    largest: str | None = None
    explain: bool = False
    details: bool = False  # everything that is known, not one screen
    price: float | None = None  # of one GPU for one hour, in any currency

    def gpus_for(self, recipe: Recipe) -> Gpus | None:
        """The GPUs that `--gpus` names, else the recipe's; None for a CPU. Raises FinetuneError."""
        if self.gpus is not None:
            return parse_gpus(self.gpus, self.nodes)
        if self.nodes is not None:
            raise FinetuneError(f"--nodes: {self.nodes}: of which GPUs? add --gpus 8xH100, the GPUs of each node")
        return gpus_of(recipe.budget)


@contextmanager
def without_gc() -> Iterator[None]:
    """Import without garbage collection: traversing a million permanent objects takes one second in ten."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def plan_by_trace(
    recipe: Recipe,
    gpus: Gpus | None,
    *,
    batches: Sequence[MicroBatch] | None = None,
    ranks: int | None = None,
    must_fit: bool = False,
) -> Plan:
    """Plan by a trace.

    Raises FinetuneError. It is EnvironmentMismatch if a library fails on fake tensors and, with `must_fit`, DoesNotFit
    as soon as that is certain.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # logs missing optional kernels
    with redirect_stdout(io.StringIO()):  # DeepSpeed, where it is installed, prints when Accelerate imports it
        with without_gc():
            from finetune.planner.plan_recipe import plan_recipe

        try:
            return plan_recipe(recipe, gpus, batches=batches, ranks=ranks, must_fit=must_fit)
        except FinetuneError:
            raise
        except Exception as error:  # a library does not support fake tensors
            why = f"{type(error).__name__}: {(str(error).splitlines() or ['without a message'])[0][:200]}"
            raise EnvironmentMismatch(
                f"{recipe.accelerate_config}: the planner cannot trace it ({why}); `finetune compare` measures it"
            ) from error


def plan_in_words(words: Sequence[str], options: PlanOptions, model: str | None, note: Note) -> Output:
    """`finetune plan WORDS`: JSON, in which `ok` says whether the recipe fits, and text. Raises FinetuneError.

    Words with `=` are overrides, the others recipe files. Several recipes are compared. Without a recipe, LoRA on
    `model` is planned.
    """
    recipes = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if recipes and model is not None:
        raise FinetuneError(
            f"--model: {model}: use either --model or a recipe ({recipes[0]}), not both. To plan the recipe on another "
            "model, write model.name_or_path="
        )
    if model is not None:
        gpus = None
        if options.gpus is not None:
            gpus = parse_gpus(options.gpus, options.nodes)
        if gpus is None:
            raise FinetuneError(f"--model: {model}: on which GPUs? add --gpus 1x80GB, or name a recipe for a CPU")
        with tempfile.TemporaryDirectory(prefix="finetune-plan-") as folder:
            page = Path(folder) / f"{model.rpartition('/')[2]}.yaml"
            content = candidates.adapters(candidates.for_model(model), gpus).model_dump(
                mode="json", exclude_defaults=True
            )
            page.write_text(json.dumps(content), "utf-8")
            recipe = load_recipe(page, overrides).recipe
        return _plan_loaded(recipe, gpus, options, note)
    if not recipes:
        raise FinetuneError("RECIPE: is missing; name a recipe file, or --model NAME --gpus 2x24GB, maybe with --pick")
    if options.price is not None and (len(recipes) > 1 or options.largest):
        note("--price: a cost is shown for one recipe alone, without --largest")
    if len(recipes) > 1:
        return _compare([Path(word) for word in recipes], overrides, options, note)
    loaded = load_recipe(Path(recipes[0]), overrides)
    gpus = options.gpus_for(loaded.recipe)
    loaded, formats = loaded.formats_for(fastest_for(gpus.count if gpus else 0))
    result, text = _plan_loaded(loaded.recipe, gpus, options, note)
    if not formats.line:
        return result, text
    return result | {"formats": formats.facts}, f"{text}\n{formats.line}"


def _plan_loaded(recipe: Recipe, gpus: Gpus | None, options: PlanOptions, note: Note) -> Output:
    if options.largest is not None:
        if recipe.training.activation_checkpointing == "auto":  # it recomputes all layers at the largest size
            recipe = changed(recipe, {"training.activation_checkpointing": True})
        return _largest(recipe, gpus, options.largest, note)
    chosen = choose_recomputation(recipe, gpus)
    recipe = chosen.recipe
    planned_config(recipe.model.name_or_path, recipe.model.revision)  # once, before two processes ask the Hub for it
    wait = "; under ZeRO this takes a minute or two" if cached_strategy(recipe.accelerate_config).uses_engine else ""
    note(f"tracing {candidates.variant_in_words(recipe)}; and probing the model{wait}")
    with without_gc():
        from finetune.probe.forked import probed_in_child

    with probed_in_child(recipe) as probed:
        result, text = _planned(recipe, gpus, note, options)
        found = probed()
    result["probe"] = found.as_json()
    if options.details:
        text += f"\n\n{found.line()}"
    else:
        text += f"\n{found.line().partition(chr(10))[0]}"
    if chosen.line:
        result["recomputation"] = chosen.facts
        text += f"\n{chosen.line}"
    if not options.details:
        text += "\nmore: --details; the arithmetic: --explain"
    return result, text


def _planned(recipe: Recipe, gpus: Gpus | None, note: Note, options: PlanOptions) -> Output:
    """The plan, changes that make it fit or uses for spare memory, and its arithmetic if that is asked for."""
    planned = plan_by_trace(recipe, gpus)
    from finetune.planner.memory_table import plan_bars, plan_json, plan_text, verdict
    from finetune.planner.roofline import roofline_json, roofline_lines
    from finetune.training.batch_notes import notes_before_launch

    code = 0 if planned.fits else DoesNotFit.exit_code
    batches = notes_before_launch(recipe, ranks=planned.ranks)
    result: dict[str, Any] = {"ok": planned.fits, "exit_code": code, **plan_json(planned), **roofline_json(planned)}
    result["batches"] = batches
    result["run"] = whole_run(recipe, result, options.price)
    if options.details:
        text = [plan_text(planned), "", *roofline_lines(planned), "", *batches["notes"]]
        text.insert(1, run_in_words(result["run"], result, gpus))
    else:
        text = [verdict(planned), run_in_words(result["run"], result, gpus), "", *plan_bars(planned), ""]
        text += [f"assumed: {'; '.join(planned.notes)}"]
    config = planned_config(recipe.model.name_or_path, recipe.model.revision)[0]
    if gpus is not None and not planned.fits:
        sizes = f"{planned.needed / GIB:.1f} GiB of {gpus.memory / GIB:.1f}"
        note(f"  {sizes}, does not fit; looking for changes that make it fit")
        fitting = remedies.remedies(recipe, config, gpus, _noted(note), tries=TRACES, traced=TRACED)
        result["changes"] = [each.as_json() for each in fitting]
        result["advice"] = [*remedies.fitting_lines(fitting)]
        text += ["", *result["advice"]]
    elif gpus is not None and unsupported(recipe, config, gpus) is None:
        spare = remedies.spare(recipe, config, gpus)
        result["spare"] = [each.as_json() for each in spare]
        if spare and options.details:
            text += ["", "the spare memory could be used for one of these (by the closed form):"]
            text += remedies.lines(spare)
        elif spare:
            text += [f"the spare memory could hold {', or '.join(each.words for each in spare[:3])}"]
    if options.explain:
        result["explanation"] = explain_plan(recipe, config, gpus)
        text += ["", result["explanation"]]
    return result, "\n".join(text)


def whole_run(recipe: Recipe, plan: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Steps, tokens, seconds and cost of a whole run; None for what is not known.

    Args:
        plan: A plan's JSON: `batches` has the steps if the data are here, `speed` the seconds if a GPU is named.
        price: Of one GPU for one hour.

    Seconds are a lower bound, as the speed is an upper one: 600 steps of 12 s are 2 hours; on 4 GPUs at 1.50 an hour
    they cost 12. The speed is that of full rows. Of rows that hold a tenth of their tokens, a step takes a tenth of
    forward and backward, and less of attention, which is left out of the bound.
    """
    batches, speed = plan["batches"], plan.get("speed") or {}
    steps = batches.get("steps") or recipe.training.max_steps
    tokens = None
    if steps is not None and batches.get("tokens_per_step"):
        tokens = round(steps * batches["tokens_per_step"])
    seconds = None
    if steps is not None and speed.get("step_seconds"):
        update = speed.get("update_seconds", 0.0)
        computing = speed["step_seconds"] - update
        if tokens is not None:
            full_step = speed["step_seconds"] * speed["tokens_per_second"]
            share = min(1.0, batches["tokens_per_step"] / full_step)
            if share < ALMOST_FULL:
                computing *= share * (1 - (plan.get("arithmetic") or {}).get("attention_share", 0.0))
        seconds = steps * (computing + update)
    gpus = recipe.budget.gpus * recipe.budget.nodes or speed.get("ranks", 1)
    cost = None if price is None or seconds is None else round(seconds / 3600 * price * speed.get("ranks", gpus), 2)
    return {"steps": steps, "tokens": tokens, "seconds": seconds, "cost": cost}


def run_in_words(run: dict[str, Any], plan: dict[str, Any], gpus: Gpus | None) -> str:
    """Time, steps and cost in a line, or what would have to be added to know them."""
    speed = plan.get("speed") or {}
    parts = []
    if run["steps"] is not None:
        tokens = f" ({run['tokens'] / 1e6:.3g} M tokens)" if run["tokens"] else ""
        parts.append(f"{counted(run['steps'], 'step')}{tokens}")
    if run["seconds"] is not None:
        hours, minutes = divmod(math.floor(run["seconds"] / 60), 60)
        least = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        if not hours and not minutes:
            least = f"{math.floor(run['seconds'])} s"
        parts.append(f"at least {least}{'' if run['tokens'] else ' if rows are full'}")
    if speed.get("step_seconds"):
        parts.append(
            f"{speed['step_seconds']:.3g} s a step of full rows, at most {speed['tokens_per_second']:,.0f} tokens/s"
        )
    if run["cost"] is not None:
        on_all = f"all {speed['ranks']} GPUs" if speed.get("ranks", 1) > 1 else "the GPU"
        parts.append(f"from {run['cost']:,.2f} for {on_all}, in the price's currency")
    missing = []
    if run["steps"] is None:
        missing.append(
            "the number of rows is not known here; training.max_steps=N gives steps, and on a named GPU time and cost"
        )
    if gpus is not None and not speed.get("step_seconds"):
        missing.append("a GPU's name, --gpus L4, adds time and cost")
    if gpus is None:
        missing.append("its time on a CPU is not planned, nor its cost")
    return "the run: " + "; ".join([*parts, *missing])


def _noted(note: Note) -> remedies.PlanFunction:
    """`plan_by_trace`, with a note at its beginning and its verdict."""

    def plan(recipe: Recipe, gpus: Gpus) -> Plan:
        note(f"tracing {candidates.variant_in_words(recipe)}")
        found = plan_by_trace(recipe, gpus)
        note(f"  {_needed_in_words(found.needed, found.fits, gpus)}")
        return found

    return plan


def _needed_in_words(needed: int, fits: bool, gpus: Gpus) -> str:
    words = f"{needed / GIB:.1f} GiB of {gpus.memory / GIB:.1f}"
    return words if fits else f"{words}, does not fit"


def _largest(recipe: Recipe, gpus: Gpus | None, name: str, note: Note) -> Output:
    config = planned_config(recipe.model.name_or_path, recipe.model.revision)[0]
    found = remedies.largest(recipe, config, gpus, name, _noted(note))
    assert gpus is not None
    words = f"{found.key}={found.value}  needs {found.needed / GIB:.1f} GiB of {gpus.memory / GIB:.1f} a GPU"
    if found.next_value is None:
        words += "; it is the largest there is"
    else:
        words += f"; {found.next_value} does not fit"
    return {"ok": True, "gpu_bytes": gpus.memory, **found.as_json()}, words


def _compare(recipes: Sequence[Path], overrides: Sequence[str], options: PlanOptions, note: Note) -> Output:
    """Each recipe on the named GPUs, or on its own; by the closed form if its verdict is clear, else by trace."""
    rows = [_compare_one(path, overrides, options, note) for path in recipes]
    width = max(len(row["recipe"]) for row in rows)
    lines = [f"{'recipe':<{width}}  {'GiB':>7}  {'of':>7}  {'fits':<5} planned by"]
    for row in rows:
        if row["needed_bytes"] is None:
            lines.append(f"{row['recipe']:<{width}}  {row['planned_by']}")
            continue
        memory = f"{row['gpu_bytes'] / GIB:7.1f}" if row["gpu_bytes"] else f"{'CPU':>7}"
        fits, planned_by = "yes" if row["fits"] else "no", row["planned_by"]
        lines.append(f"{row['recipe']:<{width}}  {row['needed_bytes'] / GIB:7.1f}  {memory}  {fits:<5} {planned_by}")
    return {"ok": True, "recipes": rows}, "\n".join(lines)


def _compare_one(path: Path, overrides: Sequence[str], options: PlanOptions, note: Note) -> dict[str, Any]:
    """A row for one recipe; `needed_bytes` is None if the planner refuses it."""
    loaded = load_recipe(path, overrides)
    gpus = options.gpus_for(loaded.recipe)
    loaded = loaded.formats_for(fastest_for(gpus.count if gpus else 0))[0]
    recipe = choose_recomputation(loaded.recipe, gpus).recipe
    row: dict[str, Any] = {"recipe": path.stem, "gpu_bytes": gpus.memory if gpus else None}
    config = planned_config(recipe.model.name_or_path, recipe.model.revision)[0]
    if gpus is not None and unsupported(recipe, config, gpus) is None:
        needed = estimate(recipe, config, gpus).needed
        if abs(needed / gpus.memory - 1) > remedies.NEAR_LIMIT:
            return row | {"needed_bytes": needed, "fits": needed <= gpus.memory, "planned_by": "closed form"}
    note(f"{path.stem}: tracing {candidates.variant_in_words(recipe)}")
    try:
        planned = plan_by_trace(recipe, gpus)
    except FinetuneError as error:
        return row | {"needed_bytes": None, "fits": None, "planned_by": str(error)}
    return row | {"needed_bytes": planned.needed, "fits": planned.fits, "planned_by": "trace"}


@dataclass
class _Search:
    """Plans for variants, and the least bytes among them."""

    gpus: Gpus
    note: Note
    least: int | None = None
    refusal: FinetuneError | None = None
    planned: dict[str, Plan] = field(default_factory=dict)

    def fits(self, recipe: Recipe) -> bool:
        try:
            found = plan_by_trace(recipe, self.gpus, must_fit=True)
        except DoesNotFit as error:
            needed, fits = error.needed, False
        except FinetuneError as error:  # the trainer would refuse it
            self.refusal = error
            self.note(f"{candidates.variant_in_words(recipe)}: refused")
            return False
        else:
            needed, fits = found.needed, found.fits
            self.planned[recipe.model_dump_json()] = found
        verdict = "" if fits else ", does not fit"
        self.note(f"{candidates.variant_in_words(recipe)}: {needed / GIB:.1f} GiB{verdict}")
        if self.least is None or needed < self.least:
            self.least = needed
        return fits


def pick_in_words(
    words: Sequence[str], model: str | None, options: PlanOptions, file: Path | None, note: Note
) -> Output:
    """`finetune plan --pick` as JSON and as text, written to `file` if one is named. Raises FinetuneError.

    Args:
        words: A recipe whose model, data and settings are kept, with overrides; or none, then `model` is named.
    """
    if options.gpus is None or not (words or model):
        raise FinetuneError("--pick: needs a model and GPUs; add --model meta-llama/Llama-3.1-8B --gpus 2x24GB")
    gpus = parse_gpus(options.gpus, options.nodes)
    if gpus is None:
        raise FinetuneError("--pick: finds recipes for GPUs, not for a CPU; add --gpus 2x24GB")
    if words:
        overrides = list(words[1:])
        if model is not None:
            overrides.append(f"model.name_or_path={model}")
        loaded = load_recipe(Path(words[0]), overrides).formats_for(fastest_for(gpus.count))[0]
        wanted = candidates.for_recipe(loaded.recipe)
    else:
        wanted = candidates.for_model(str(model))
    if options.price is not None:
        note("--price: give it to `finetune plan` with the picked recipe, which shows the cost")
    recipe, planned = pick_recipe(wanted, gpus, note, written=options.gpus)
    text = candidates.commented(recipe, planned.needed, gpus, max(planned.host.values(), default=0))
    if file is not None:
        file.write_text(text, "utf-8")
    result = {"ok": True, "needed_bytes": planned.needed, "gpu_bytes": gpus.memory, "recipe": text}
    return result | {"file": None if file is None else str(file)}, text.rstrip()


def pick_recipe(wanted: candidates.Wanted, gpus: Gpus, note: Note, *, written: str = "") -> tuple[Recipe, Plan]:
    """The best recipe on these GPUs, planned by trace, and its plan.

    Args:
        wanted: The model, and what else is kept.
        note: Receives a line for each variant that is planned. A plan takes seconds to minutes.
        written: The GPUs as the user wrote them, for messages.

    Raises DoesNotFit if no variant fits.
    """
    model = wanted.model
    config, source = planned_config(model)
    search = _Search(gpus, note)
    if unsupported(candidates.adapters(wanted, gpus), config, gpus) is None:
        certain = islice(candidates.fitting_recipes(wanted, config, gpus), TRIES)
        search.least = candidates.smallest(wanted, config, gpus)
        tried = chain(certain, candidates.last_resorts(wanted, config, gpus), candidates.offloaded(wanted, gpus))
        recipe = next(filter(search.fits, tried), None)
    else:
        recipe = candidates.by_plans(wanted, gpus, search.fits)
        recipe = recipe or next(filter(search.fits, candidates.offloaded(wanted, gpus)), None)
    if recipe is not None:
        return recipe, search.planned[recipe.model_dump_json()]
    if search.refusal is not None and not search.planned:
        raise search.refusal
    least = search.least or 0
    message = f"--gpus: {written or gpus.name}: {model} ({source}) does not fit: its smallest variant needs "
    if least > gpus.memory:
        message += f"{least / GIB:.1f} GiB of each GPU, which has {gpus.memory / GIB:.1f}. "
    else:
        message += f"{least / GIB:.1f} of {gpus.memory / GIB:.1f} GiB for tensors. Torch's allocator needs more than "
        message += "the rest, because gaps remain between tensors. "
    raise DoesNotFit(f"{message}Use more or larger GPUs, or a smaller model.")
