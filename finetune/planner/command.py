"""`finetune plan`: from a recipe's file to its output. Heavy imports come late: mistakes are reported at once."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import planner
from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.rank import cached_strategy
from finetune.closed_form.recomputation import choose_recomputation
from finetune.errors import DoesNotFit, EnvironmentMismatch, FinetuneError
from finetune.measure.units import GIB
from finetune.model.known_configs import config_if_known, planned_config
from finetune.planner import candidates, remedies
from finetune.planner.arithmetic import explain_plan
from finetune.planner.remedies import changed
from finetune.recipe.gpus import Gpus, gpus_of, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.mixed_precision import ChosenFormats, fastest_for
from finetune.recipe.schema import Recipe
from finetune.strategies.packages import missing_packages
from finetune.wording import counted

if TYPE_CHECKING:
    from finetune.planner.plan_recipe import Plan
    from finetune.probe.probe import ProbeResult

ALMOST_FULL = 0.95  # rows that hold this share of their tokens count as full: estimates have three figures
Output = tuple[dict[str, Any], str]
_Say = Callable[[str], None]  # receives progress lines of steps that take seconds


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
            raise FinetuneError(f"--nodes: {self.nodes}: needs --gpus; name one node's GPUs, for example --gpus 8xH100")
        return gpus_of(recipe.budget)


def plan_in_words(words: Sequence[str], options: PlanOptions, model: str | None, say: _Say) -> Output:
    """`finetune plan WORDS`: JSON, in which `ok` says whether the recipe fits, and text. Raises FinetuneError.

    Words with `=` are overrides, the others recipe files. Several recipes are compared. Without a recipe, LoRA on
    `model` is planned. A plan is made beside a probe. Changes that make it fit follow, or uses for spare memory.
    """
    pages = [Path(word) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if options.price is not None and (len(pages) > 1 or options.largest):
        say("--price: a cost is shown for one recipe alone, without --largest")
    if len(pages) > 1 and model is None:
        return _compare(pages, overrides, options, say)
    recipe, gpus, formats = _asked(pages, overrides, options, model)
    format_facts: dict[str, Any] = {}
    format_lines: list[str] = []
    if formats is not None and formats.line:
        format_facts, format_lines = {"formats": formats.facts}, [formats.line]
    if options.largest is not None:
        result, line = _largest(recipe, gpus, options.largest, say)
        return result | format_facts, "\n".join([line, *format_lines])
    # Read once, before two processes ask the Hub for it.
    config = planned_config(recipe.model.name_or_path, recipe.model.revision)[0]
    chosen = choose_recomputation(recipe, config, gpus)
    recipe = chosen.recipe
    if missing := missing_packages(recipe, cached_strategy(recipe.accelerate_config), plan=True):
        if gpus is not None and unsupported(recipe, config, gpus) is None:
            sizes = f"{estimate(recipe, config, gpus).needed / GIB:.1f} of {gpus.memory / GIB:.1f} GiB"
            missing += f"; the closed form, which needs no package, says {sizes}"
        raise EnvironmentMismatch(missing)
    wait = "; under ZeRO this takes a minute or two" if cached_strategy(recipe.accelerate_config).uses_engine else ""
    say(f"tracing {candidates.variant_in_words(recipe)}; and probing the model{wait}")
    with planner.quick_imports():  # before the child is forked
        from finetune.probe.probe import probe
    probing = partial(_answer_or_refusal, partial(probe, recipe, offline=True))
    with planner.run_in_forks({0: probing}, even_one=True) as probed:
        planned = planner.plan(recipe, gpus)
        from finetune.planner.memory_table import plan_bars, plan_json, plan_text, verdict
        from finetune.planner.roofline import copying_line, roofline_json, roofline_lines
        from finetune.training.batch_notes import notes_before_launch

        code = 0 if planned.fits else DoesNotFit.exit_code
        batches = notes_before_launch(recipe, ranks=planned.ranks)
        result = {"ok": planned.fits, "exit_code": code, **plan_json(planned), **roofline_json(planned)}
        result["batches"] = batches
        result["run"] = whole_run(recipe, result, options.price)
        if options.details:
            text = [plan_text(planned), "", *roofline_lines(planned, result), "", *batches["notes"]]
            text.insert(1, run_in_words(result["run"], result, gpus))
        else:
            text = [verdict(planned), run_in_words(result["run"], result, gpus), "", *plan_bars(planned), ""]
            text += [f"assumed: {'; '.join(planned.notes)}"]
        if gpus is not None and not planned.fits:
            sizes = f"{planned.needed / GIB:.1f} GiB of {gpus.memory / GIB:.1f}"
            say(f"  {sizes}, does not fit; looking for changes that make it fit")
            fitting = remedies.remedies(recipe, config, gpus, _noted(say))
            result["changes"] = [variant.as_json() for variant in fitting]
            result["advice"] = [*remedies.fitting_lines(fitting)]
            text += ["", *result["advice"]]
        elif gpus is not None and unsupported(recipe, config, gpus) is None:
            spare = remedies.spare(recipe, config, gpus)
            result["spare"] = [variant.as_json() for variant in spare]
            if spare and options.details:
                text += ["", "the spare memory could be used for one of these (by the closed form):"]
                text += remedies.lines(spare)
            elif spare:
                text += [f"the spare memory could hold {', or '.join(variant.words for variant in spare[:3])}"]
            sharding = next((variant.words for variant in spare if remedies.STRATEGY in variant.changes), None)
            if sharding and recipe.lora is not None and result["speed"]:
                text += [line for line in [copying_line(planned, result["speed"]["step_seconds"], sharding)] if line]
        if options.explain:
            result["explanation"] = explain_plan(recipe, config, gpus)
            text += ["", result["explanation"]]
        probe_result = probed(0)
    if isinstance(probe_result, FinetuneError):
        raise probe_result
    result["probe"] = probe_result.as_json()
    text += ["", probe_result.line()] if options.details else [probe_result.line().partition("\n")[0]]
    if chosen.line:
        result |= {"recomputation": chosen.facts, "rows": chosen.rows_facts}
        text += [chosen.line]
    if not options.details:
        text += ["more: --details; the arithmetic: --explain"]
    return result | format_facts, "\n".join([*text, *format_lines])


def _asked(
    pages: Sequence[Path], overrides: Sequence[str], options: PlanOptions, model: str | None
) -> tuple[Recipe, Gpus | None, ChosenFormats | None]:
    """The recipe, its GPUs, and the number formats that were chosen for them."""
    if pages and model is not None:
        raise FinetuneError(
            f"--model: {model}: use either --model or a recipe ({pages[0]}), not both. To plan the recipe on another "
            "model, write model.name_or_path="
        )
    if pages:
        loaded = load_recipe(pages[0], overrides)
        gpus = options.gpus_for(loaded.recipe)
        loaded, formats = loaded.formats_for(fastest_for(gpus.count if gpus else 0))
        return loaded.recipe, gpus, formats
    if model is None:
        raise FinetuneError("RECIPE: is missing; name a recipe file, or --model NAME --gpus 2x24GB, maybe with --pick")
    gpus = None
    if options.gpus is not None:
        gpus = parse_gpus(options.gpus, options.nodes)
    if gpus is None:
        raise FinetuneError(f"--model: {model}: on which GPUs? add --gpus 1x80GB, or name a recipe for a CPU")
    with tempfile.TemporaryDirectory(prefix="finetune-plan-") as folder:
        page = Path(folder) / f"{model.rpartition('/')[2]}.yaml"
        content = candidates.adapters(candidates.for_model(model), gpus).model_dump(mode="json", exclude_defaults=True)
        page.write_text(json.dumps(content), "utf-8")
        return load_recipe(page, overrides).recipe, gpus, None


def _answer_or_refusal(probe: Callable[[], ProbeResult]) -> ProbeResult | FinetuneError:
    """The probe's answer, or its refusal in a form that a child can send."""
    try:
        return probe()
    except FinetuneError as error:
        kind = EnvironmentMismatch if isinstance(error, EnvironmentMismatch) else FinetuneError
        return kind(str(error))


def whole_run(recipe: Recipe, plan: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Steps, tokens, seconds and cost of a whole run; None for what is not known.

    Args:
        plan: A plan's JSON: `batches` has the steps if the data are here, `speed` the seconds if a GPU is named.
        price: Of one GPU for one hour.

    Seconds are a lower bound, as the speed is an upper one: 600 steps of 12 s are 2 hours; on 4 GPUs at 1.50 an hour
    they cost 12. The speed is that of full rows. If rows hold a tenth of their tokens, a step takes a tenth of forward
    and backward. Attention takes less than that, so the bound does not count it.
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


def _noted(say: _Say, *, memory_alone: bool = False) -> remedies.PlanFunction:
    """The plan, with a note at its beginning and its verdict."""

    def plan(recipe: Recipe, gpus: Gpus) -> Plan:
        say(f"tracing {candidates.variant_in_words(recipe)}")
        planned = planner.plan(recipe, gpus, memory_alone=memory_alone)
        verdict = "" if planned.fits else ", does not fit"
        say(f"  {planned.needed / GIB:.1f} GiB of {gpus.memory / GIB:.1f}{verdict}")
        return planned

    return plan


def _largest(recipe: Recipe, gpus: Gpus | None, name: str, say: _Say) -> Output:
    if recipe.training.activation_checkpointing == "auto":  # it recomputes all layers at the largest size
        recipe = changed(recipe, {"training.activation_checkpointing": True})
    config = planned_config(recipe.model.name_or_path, recipe.model.revision)[0]
    facts = remedies.largest(recipe, config, gpus, name, _noted(say, memory_alone=True))
    assert gpus is not None
    words = f"{facts['change']}  needs {facts['needed_bytes'] / GIB:.1f} GiB of {gpus.memory / GIB:.1f} a GPU"
    if facts["does_not_fit"] is None:
        words += "; it is the largest there is"
    else:
        words += f"; {facts['does_not_fit'].partition('=')[2]} does not fit, by the {facts['next_by']}"
    if larger := facts.get("changes"):
        words += (
            f"\nlarger with one change more, by the closed form, the cheapest first (of {gpus.memory / GIB:.1f} GiB):"
        )
        most = max(option["value"] for option in larger)
        for option in larger[: remedies.SHOWN]:
            bar = "█" * max(1, round(30 * option["value"] / most))
            words += f"\n  {option['value']:>9,} {bar:<30} {option['change']}  ({option['means']})"
    return {"ok": True, "gpu_bytes": gpus.memory, **facts}, words


def _compare(recipes: Sequence[Path], overrides: Sequence[str], options: PlanOptions, say: _Say) -> Output:
    """Each recipe on the named GPUs, or on its own; by the closed form if its verdict is clear, else by trace."""
    rows = [_compare_one(path, overrides, options, say) for path in recipes]
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


def _compare_one(path: Path, overrides: Sequence[str], options: PlanOptions, say: _Say) -> dict[str, Any]:
    """A row for one recipe; `needed_bytes` is None if the planner refuses it."""
    loaded = load_recipe(path, overrides)
    gpus = options.gpus_for(loaded.recipe)
    loaded = loaded.formats_for(fastest_for(gpus.count if gpus else 0))[0]
    config = planned_config(loaded.recipe.model.name_or_path, loaded.recipe.model.revision)[0]
    recipe = choose_recomputation(loaded.recipe, config, gpus).recipe
    row: dict[str, Any] = {"recipe": path.stem, "gpu_bytes": gpus.memory if gpus else None}
    if gpus is not None and unsupported(recipe, config, gpus) is None:
        needed = estimate(recipe, config, gpus).needed
        if abs(needed / gpus.memory - 1) > remedies.NEAR_LIMIT:
            return row | {"needed_bytes": needed, "fits": needed <= gpus.memory, "planned_by": "closed form"}
    say(f"{path.stem}: tracing {candidates.variant_in_words(recipe)}")
    try:
        planned = planner.plan(recipe, gpus)
    except FinetuneError as error:
        return row | {"needed_bytes": None, "fits": None, "planned_by": str(error)}
    return row | {"needed_bytes": planned.needed, "fits": planned.fits, "planned_by": "trace"}


def pick_in_words(
    words: Sequence[str], model: str | None, options: PlanOptions, file: Path | None, say: _Say
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
    start = ""
    if words:
        overrides = list(words[1:])
        if model is not None:
            overrides.append(f"model.name_or_path={model}")
        loaded = load_recipe(Path(words[0]), overrides).formats_for(fastest_for(gpus.count))[0]
        start = loaded.path.read_text("utf-8-sig")
        search = candidates.for_recipe(loaded.recipe)
        if re.search(r"^[^#\n]+#", start, re.MULTILINE):
            say("--pick: the recipe's header stays, its comments beside keys do not")
    else:
        search = candidates.for_model(str(model))
    if options.price is not None:
        say("--price: give it to `finetune plan` with the picked recipe, which shows the cost")
    recipe, planned = pick_recipe(search, gpus, say, written=options.gpus)
    by_auto = changed(recipe, {"training.per_device_batch_size": "auto"})
    resolved = choose_recomputation(by_auto, config_if_known(by_auto.model), gpus).recipe
    if resolved.training.rows_at_once > recipe.training.rows_at_once:
        say(f"tracing {candidates.variant_in_words(resolved)}")
        more = planner.plan(resolved, gpus)
        if more.fits:
            recipe, planned = resolved, more
    if resolved == recipe:
        recipe = by_auto
    text = candidates.commented(recipe, planned.needed, gpus, max(planned.host.values(), default=0), start)
    if file is not None:
        file.write_text(text, "utf-8")
    result = {"ok": True, "needed_bytes": planned.needed, "gpu_bytes": gpus.memory, "recipe": text}
    return result | {"file": None if file is None else str(file)}, text.rstrip()


def pick_recipe(search: candidates.Search, gpus: Gpus, say: _Say, *, written: str = "") -> tuple[Recipe, Plan]:
    """The best recipe on these GPUs, planned by trace, and its plan.

    Args:
        search: The model, and what else is kept.
        say: Receives a line for each variant that is planned. A plan takes seconds to minutes.
        written: The GPUs as the user wrote them, for messages.

    Raises DoesNotFit if no variant fits.
    """
    config, source = planned_config(search.model)
    plans: dict[str, Plan] = {}
    needs: list[int] = []  # bytes of each variant
    refusal: FinetuneError | None = None

    def fits(recipe: Recipe) -> bool:
        nonlocal refusal
        words = candidates.variant_in_words(recipe)
        try:
            planned = planner.plan(recipe, gpus, must_fit=True)
        except DoesNotFit as error:
            needed, does_fit = error.needed, False
        except FinetuneError as error:  # the trainer would refuse it
            refusal = error
            say(f"{words}: refused")
            return False
        else:
            needed, does_fit = planned.needed, planned.fits
            plans[recipe.model_dump_json()] = planned
        needs.append(needed)
        say(f"{words}: {needed / GIB:.1f} GiB{'' if does_fit else ', does not fit'}")
        return does_fit

    recipe = None
    if unsupported(candidates.adapters(search, gpus), config, gpus) is not None:
        recipe = candidates.by_plans(search, gpus, fits)
    else:
        fitting, smallest = candidates.fitting_recipes(search, config, gpus)
        needs.append(smallest)
        recipe = next(filter(fits, fitting), None)
    recipe = recipe or next(filter(fits, candidates.offloaded(search, gpus)), None)
    if recipe is not None:
        return recipe, plans[recipe.model_dump_json()]
    if refusal is not None and not plans:
        raise refusal
    least = min(needs, default=0)
    message = f"--gpus: {written or gpus.name}: {search.model} ({source}) does not fit: its smallest variant needs "
    if least > gpus.memory:
        message += f"{least / GIB:.1f} GiB of each GPU, which has {gpus.memory / GIB:.1f}. "
    else:
        message += f"{least / GIB:.1f} of {gpus.memory / GIB:.1f} GiB for tensors. Torch's allocator needs more than "
        message += "the rest, because gaps remain between tensors. "
    raise DoesNotFit(f"{message}Use more or larger GPUs, or a smaller model.")
