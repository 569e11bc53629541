"""`finetune import FILE --prove`: the foreign configuration by its own trainer, and our recipe, step by step.

Both begin with one small model and take the same rows in one order, in float32. If their curves differ, each possible
cause is switched off in the tool's training. A cause is one without which the curves stay apart.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.sources import resolve
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import read_lines
from finetune.importers import Imported, convert
from finetune.launch.with_parent import with_parent
from finetune.model.known_configs import config_here
from finetune.model.packaged import folder_of
from finetune.output_stream import one_line, silenced, without_controls
from finetune.paths import PACKAGE, read_regular
from finetune.preflight.changes import SAMPLE_CHAT, RecipeChange, overrides, sample_preferences
from finetune.preflight.job import (
    StepFailed,
    TrainingJob,
    ended_by_signals,
    failure_reason,
    kill_all,
    relative_difference,
    started,
    train_lines,
    wait_for_end,
)
from finetune.preflight.shrink import CHAT_TEMPLATE, shrink_model
from finetune.recipe.foreign_keys import TOOL_TITLES, Tool
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.wording import install_command

if TYPE_CHECKING:
    from finetune.tokens.dataset import Prepared

CHILD = PACKAGE / "preflight" / "foreign_trainer.py"
STEPS, ROWS, TEXTS = 20, 64, 3
MICRO_BATCH, ROWS_A_STEP, LONGEST, PHASE = 4, 8, 384, 4  # at most; PHASE: steps of warming up
RATE = 1e-3  # the highest rate on both sides at least: with 1e-6 twenty steps show nothing
TRAINING_SECONDS = 600  # of one training in the child
# Largest relative differences of trainings that compute the same. Measured: 6e-8, 3e-7 and 0.
SAME_CURVE = {"loss": 1e-4, "grad_norm": 1e-3, "learning_rate": 1e-5}
STAND_IN = "HuggingFaceTB/SmolLM2-135M"  # a Llama, for a model whose configuration this machine lacks

# All that passes from the foreign file: numbers, switches and words. `foreign_setting` handles its batch and template.
LORA = "lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_rslora use_dora".split()
PASSED = (
    *LORA,
    *"learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm warmup_steps warmup_ratio".split(),
    *"lr_scheduler_type label_smoothing_factor neftune_noise_alpha max_length truncation_mode loss_type beta".split(),
    *"packing packing_strategy assistant_only_loss completion_only_loss dataset_text_field label_smoothing".split(),
    *"loss_weights desirable_weight undesirable_weight rpo_alpha ld_alpha cpo_alpha simpo_gamma alpha".split(),
    *"disable_dropout use_weighting f_divergence_type router_aux_loss_coef optim".split(),
)
FORMER = {"max_seq_length": "max_length", "model_max_length": "max_length"}  # a key's former name -> today's
FLOAT32_OPTIMIZERS = ("adafactor", "sgd", "adagrad", "rmsprop")  # besides AdamW: those that keep float32 state on a CPU
# The trainer's key -> the recipe's, where both have the value itself.
VALUE_KEYS = {
    **{key: f"training.{key}" for key in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")},
    **{key: f"{{objective}}.{key}" for key in ("beta", "simpo_gamma", "desirable_weight", "undesirable_weight")},
    **{key: f"lora.{key.removeprefix('lora_') if key == 'lora_r' else key}" for key in LORA if "modules" not in key},
}
TITLES = {"theirs": "TRL", "ours": "recipe"}
Curve = list[dict[str, Any]]  # of each step: the keys of SAME_CURVE
RowDocuments = list[tuple[list[int], list[bool]]]  # of a row: tokens, and whether each is supervised


@dataclass(frozen=True)
class Sides:
    """The small training of both sides."""

    recipe: Recipe
    words: tuple[str, ...]  # overrides of the imported recipe
    setting: dict[str, Any]  # for the child
    asked: dict[str, Any]  # of the child: the training as the foreign configuration says
    notes: tuple[str, ...]
    prepared: Prepared


@dataclass(frozen=True)
class Cause:
    """A possible reason for different curves, and the request that switches it off in the tool's training."""

    text: str
    off: dict[str, Any]
    said: bool  # whether the recipe says that it trains differently there


def prove_import(
    file: Path, *, tool: Tool | None, gpus: str | None, python: Path | None, log: Callable[[str], None]
) -> dict[str, Any]:
    """Train both sides, compare them, find the causes. Returns the report, whose keys docs/guide.md explains.

    `exit_code` is 4 if they differ and the recipe does not say so. Raises FinetuneError if the file cannot be tried.
    """
    imported = convert(file, tool=tool, gpus=gpus)
    if imported.tool != "trl":
        title = TOOL_TITLES[imported.tool]
        raise FinetuneError(f"{file}: --prove trains TRL's configurations; {title}'s own trainer has not been tried")
    if script := {"train_file", "block_size"} & imported.values.keys():
        key = min(script)
        raise FinetuneError(f"{file}: {key}: is run_clm's, a script in no package; --prove has not been tried with it")
    if python is not None and not os.access(python, os.X_OK):
        raise FinetuneError(f"--python: {python}: is no program; name the interpreter of the environment with TRL")
    with tempfile.TemporaryDirectory(prefix="finetune-prove-") as name, ended_by_signals(), cache_in(Path(name)):
        folder = Path(name)
        log("making both trainings small")
        sides = make_small(imported, folder)
        log("training the recipe")
        ours = train_recipe(sides, folder)
        log(f"training by TRL's {sides.setting['trainer']}Trainer")
        with foreign_trainer(python or Path(sys.executable), sides.setting, folder) as (version, ask):
            first = ask(sides.asked | {"show": True})
            if "error" in first:
                trainer = f"TRL {version}'s own {sides.setting['trainer']}Trainer"
                raise FinetuneError(f"{file}: {trainer} refuses it: {one_line(first['error'])}; correct the file")
            tokens = compare_tokens(sides, first["documents"], folder / "documents.json")
            causes = possible_causes(imported, sides, first, ours, tokens)
            differences, is_explained = find_causes(ask, sides.asked, causes, first["steps"], ours)
    for text in [f"adapters of one side alone: {', '.join(first['adapters'][:3])}"] * bool(first["adapters"]):
        differences.append({"cause": text, "said": False, "moves": None})
    notes = [*sides.notes]
    if first["unknown"]:
        notes.append(f"TRL {version} does not know {', '.join(first['unknown'])}: not passed")
    if not tokens["rows"]:
        notes.append(f"tokens: not compared, because TRL {version} keeps them in other columns")
    same = distance(first["steps"], ours) <= 1 and not differences
    ok = same or (is_explained and all(difference["said"] for difference in differences))
    rows = len(sides.asked["rows"]) if sides.asked.get("all_rows") else sides.recipe.training.global_batch_size
    return {
        "ok": ok,
        "same": same,
        "explained": is_explained,
        "trainer": f"TRL {version}, {sides.setting['trainer']}Trainer",
        "steps": STEPS,
        "rows_a_step": rows,
        "notes": notes,
        "theirs": first["steps"],
        "ours": ours,
        "largest_difference": {key: finite(largest_difference(first["steps"], ours, key)) for key in SAME_CURVE},
        "texts": tokens["texts"],
        "differences": differences,
    } | ({} if ok else {"exit_code": EnvironmentMismatch.exit_code})


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Keep tokens and results of trials in the temporary folder, not in the user's cache."""
    before = os.environ.get("FINETUNE_CACHE", "")  # empty means the default
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        os.environ["FINETUNE_CACHE"] = before


# -- both trainings, small ---------------------------------------------------------------------------------------------


def make_small(imported: Imported, folder: Path) -> Sides:
    """The model, its start, the rows and their order. Raises FinetuneError."""
    from finetune.model.build import load_tokenizer
    from finetune.tokens.batches import rows_of_step
    from finetune.tokens.dataset import prepare

    (page := folder / "recipe.yaml").write_text(imported.text, "utf-8")
    recipe, values = load_recipe(page).recipe, imported.values
    training, section, lora = recipe.training, recipe.model, recipe.lora
    entry, notes = write_rows(recipe, values, folder)
    longest = min(LONGEST, recipe.data.max_length)
    data = RecipeChange({"data.train": [entry], "data.eval": None, "data.max_length": longest})
    name = section.name_or_path
    if config_here(name, section.revision) is None:
        notes.append(f"model: a Llama instead of {name}, whose configuration is not on this machine")
        name = STAND_IN
    base = folder_of(name, section.revision)
    with silenced():
        tokenizer = load_tokenizer(recipe) if base and (base / "tokenizer.json").is_file() else None
        rows = load_recipe(page, overrides([data])).recipe.data
        model = shrink_model(name, section.revision, rows, folder / "model", tokenizer=tokenizer)
    notes.append(f"model: {model.architecture} of {model.parameters:,} random weights, float32 on both sides")
    if tokenizer is None:
        notes.append(f"tokenizer: {model.vocabulary} tokens learned from the rows, with a ChatML template")
        if values.get("assistant_only_loss"):
            (folder / "model" / "chat_template.jinja").write_text(template_with_marks(), "utf-8")

    # Each side takes its batch from its own keys, so that a batch that was carried over wrongly shows.
    micro = min(MICRO_BATCH, training.rows_at_once)
    accumulated = training.global_batch_size // (
        training.rows_at_once * max(1, recipe.budget.gpus * recipe.budget.nodes)
    )
    batch = micro * min(max(1, accumulated), ROWS_A_STEP // micro)
    factor = max(1.0, RATE / training.learning_rate)
    if factor > 1:
        notes.append(f"learning rate: {factor:.3g} times as high on both sides, so that {STEPS} steps show something")
    if recipe.quantization is not None:
        notes.append("quantization: none on both sides")
    settings: dict[str, Any] = {
        "accelerate_config": "single", "budget": {"gpus": 0}, "model.name_or_path": str(model.folder),
        "model.revision": "main", "model.dtype": "float32", "model.attention": "auto", "quantization": None,
        "training.mixed_precision": "no", "training.pure_bf16": False, "training.optim": "adamw",
        "training.activation_checkpointing": False, "training.compile": False, "training.max_steps": STEPS,
        "training.learning_rate": training.learning_rate * factor,
        "training.lr_scheduler_kwargs": {key: short(key, each) for key, each in training.lr_scheduler_kwargs.items()},
        "training.warmup_steps": short("steps", training.warmup_steps), "training.resume": "never",
        "training.global_batch_size": batch, "training.per_device_batch_size": micro,
        "training.early_stopping_patience": None, "training.load_best_model_at_end": False, "hub": {}, "report_to": [],
        "logging_steps": 1, "save_steps": STEPS, "eval_steps": STEPS, "samples.count": 0, "measure_phases": False,
    }  # fmt: skip
    if lora is not None:
        settings["lora.lora_dropout"] = 0.0
        if lora.lora_dropout:
            notes.append("lora_dropout: 0 on both sides, because its random numbers differ")
    small = load_recipe(page, overrides([data, RecipeChange(settings)])).recipe
    setting = foreign_setting(values, small, folder, notes) | {"rate_factor": factor, "adapter": None}
    if lora is not None:
        settings["model.adapter"] = str(write_adapters(small, folder / "adapter"))
        setting["adapter"] = str(folder / "adapter" / "adapter_model.safetensors")
    with silenced():
        prepared = prepare(small, load_tokenizer(small))
    notes += prepared.notes
    lines = prepared.pool.stores[0].lines
    order = [int(lines[document]) - 1 for document in prepared.split.train]
    asked: dict[str, Any] = {"rows": order}
    if small.data.packing and training.objective == "supervised":
        settings["training.global_batch_size"] = len(prepared.train)
        asked["all_rows"] = True
        notes.append("packing: each step takes all rows, because each side fills its packed rows in another way")
    else:
        stream = {"rows": len(order), "global_batch_size": batch, "seed": training.seed, "total_rows": STEPS * batch}
        asked["rows"] = [order[row] for step in range(STEPS) for row in rows_of_step(step, **stream)]
    words = tuple(overrides([data, RecipeChange(settings)]))
    return Sides(load_recipe(page, words).recipe, words, setting, asked, tuple(notes), prepared)


def short(key: str, value: Any) -> Any:
    """A schedule's number of steps, at most PHASE; other values stay."""
    is_long = ("steps" in key or key == "timescale") and is_number(value) and value > PHASE
    return PHASE if is_long else value


def write_rows(recipe: Recipe, values: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write rows.jsonl from the file's local data, else from sample chats. Returns its entry and a note."""
    objective, entries, file = recipe.training.objective, recipe.data.train, folder / "rows.jsonl"
    entry: dict[str, Any] = {"path": "json", "data_files": str(file)}
    local = [source for source in map(resolve, entries) if source.kind != "hub"]
    if local:
        turns = zip_longest(*(source.rows() for source in local))
        found = (row.values for turn in turns for row in turn if row is not None and row.values is not None)
        rows = list(islice(found, ROWS))
        kept = entries[0].model_dump(exclude_defaults=True)
        entry |= {key: kept[key] for key in ("format", "columns", "roles", "chat_template_kwargs") if key in kept}
        note = f"rows: {len(rows)} of {', '.join(source.name for source in local)}"
    else:
        sample = SAMPLE_CHAT
        if objective != "supervised":
            entry["format"] = "kto" if objective == "kto" else "preference"
            sample = sample_preferences(entry["format"], folder)
        rows = [json.loads(line) for line in sample.read_text("utf-8").splitlines()]
        if values.get("completion_only_loss"):
            rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
        named = ", ".join(each.path for each in entries)
        note = f"rows: {len(rows)} of data/sample_chat.jsonl instead of {named}, which is not on this machine"
    file.write_text("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows), "utf-8")
    return entry, [note]


def template_with_marks() -> str:
    """The small tokenizer's template with marks around the answers, which TRL's assistant_only_loss needs."""
    start, stop = CHAT_TEMPLATE.index("{%- if message['reasoning"), CHAT_TEMPLATE.index("{{- '<|im_end|>\n' }}")
    turn = CHAT_TEMPLATE[start:stop] + "{{- '<|im_end|>' }}"
    answer = "{%- if message['role'] == 'assistant' %}{% generation %}" + turn + "{% endgeneration %}{%- else %}"
    rest = CHAT_TEMPLATE[stop:].replace("<|im_end|>\n", "\n", 1)
    return CHAT_TEMPLATE[:start] + answer + turn + "{%- endif %}" + rest


def write_adapters(recipe: Recipe, folder: Path) -> Path:
    """Save the recipe's adapters as they start, so that both sides begin with them."""
    import torch

    from finetune.model.build import build_model

    with silenced(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.training.seed)
        model: Any = build_model(recipe, torch.device("cpu"))
        model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def foreign_setting(values: Mapping[str, Any], small: Recipe, folder: Path, notes: list[str]) -> dict[str, Any]:
    """The setting for the child. Of the foreign file it holds what `is_plain` lets through, and a template's text."""
    config: dict[str, Any] = {}
    for key, value in values.items():
        name = FORMER.get(key, key)
        if name in PASSED and is_plain(value):
            config[name] = short(name, value)
    micro = min(MICRO_BATCH, whole(values.get("per_device_train_batch_size"), 8))
    accumulated = min(whole(values.get("gradient_accumulation_steps"), 1), ROWS_A_STEP // micro)
    longest = min(LONGEST, config.get("max_length") or 1024)
    config |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulated, "max_length": longest}
    optimizer = str(config.get("optim") or "adamw_torch")
    if optimizer not in FLOAT32_OPTIMIZERS:
        config["optim"] = "adamw_torch"
        if not optimizer.startswith("adamw_torch"):
            notes.append(f"optim: AdamW in float32 on both sides instead of {optimizer}")
    shapes = values.get("lr_scheduler_kwargs")
    if isinstance(shapes, dict):
        config["lr_scheduler_kwargs"] = {str(key): short(key, each) for key, each in shapes.items() if is_number(each)}
    lora = {key: config.pop(key) for key in LORA if key in config}
    trainer = {"supervised": "SFT", "dpo": "DPO", "kto": "KTO"}[small.training.objective]
    if trainer == "DPO" and small.dpo.loss_type == "simpo":
        trainer = "CPO"
    template = values.get("chat_template") or values.get("chat_template_path")
    if isinstance(template, str) and "{" not in template:
        is_file = template.endswith(".jinja")
        template = read_regular(Path(template), 2**20).decode("utf-8") if is_file else None
    fixed = {
        "output_dir": str(folder / "theirs"), "use_cpu": True, "bf16": False, "fp16": False, "report_to": [],
        "save_strategy": "no", "logging_strategy": "steps", "logging_steps": 1, "max_steps": STEPS,
        "disable_tqdm": True, "train_sampling_strategy": "sequential", "gradient_checkpointing": False,
        "activation_checkpointing": False, "push_to_hub": False, "shuffle_dataset": False,
    }  # fmt: skip
    return {
        "trainer": trainer, "model": small.model.name_or_path, "rows": str(folder / "rows.jsonl"), "config": config,
        "lora": lora if values.get("use_peft") is True else None, "fixed": fixed, "effective": [*VALUE_KEYS, "packing"],
        "chat_template": template if isinstance(template, str) else None,
    }  # fmt: skip


def is_plain(value: Any) -> bool:
    """Whether a foreign value is a number, a switch or a word, or a list of these."""
    each = value if isinstance(value, list) else [value]
    return all(isinstance(one, (bool, int, float)) or re.fullmatch(r"[\w.-]{1,100}", str(one)) for one in each)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def whole(value: Any, default: int) -> int:
    """A count, which the import has checked; the default for none and for "auto"."""
    return int(value) if is_number(value) else default


# -- the trainings -----------------------------------------------------------------------------------------------------


def train_recipe(sides: Sides, folder: Path) -> Curve:
    """The recipe's curve, by a real launch. Raises FinetuneError with the run's own reason."""
    job = TrainingJob(folder / "recipe.yaml", sides.words, 1, folder)
    try:
        with started(job) as process:
            wait_for_end(job, process)
    except StepFailed as error:
        raise FinetuneError(f"the imported recipe does not train: {error}; import it without --prove") from None
    return [{key: line[key] for key in SAME_CURVE} for line in train_lines(job.run_dir)]


@contextmanager
def foreign_trainer(
    python: Path, setting: Mapping[str, Any], folder: Path
) -> Iterator[tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]]:
    """Start the child: offline, in the temporary folder, without the user's environment.

    Yields TRL's version and a function that asks for one training. Raises EnvironmentMismatch if TRL is not there.
    """
    (home := folder / "home").mkdir()
    environment = {key: os.environ[key] for key in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH") if key in os.environ}
    environment |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    environment |= dict.fromkeys(("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME"), str(home))
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(folder / "theirs.log", "wb") as log:
        process = subprocess.Popen(
            with_parent([str(python), "-I", str(CHILD)]), env=environment, cwd=home, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    words, answers = process.stdin, process.stdout

    def ask(request: Mapping[str, Any]) -> dict[str, Any]:
        timer, line = threading.Timer(TRAINING_SECONDS, process.kill), ""
        timer.start()
        try:
            words.write(json.dumps(request) + "\n")
            words.flush()
            line = answers.readline()
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        if not line:
            reason = failure_reason(None, (folder / "theirs.log").read_text("utf-8", errors="replace"))
            raise FinetuneError(f"--prove: TRL's process ended: {reason}; name another interpreter by --python")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        begun = ask(setting)
        if "error" in begun:
            remedy = f"in the checkout {install_command('bench')}, or name an interpreter that has it by --python"
            raise EnvironmentMismatch(f"--prove: TRL cannot be imported: {one_line(begun['error'])}; {remedy}")
        yield begun["version"], ask
    finally:
        kill_all(process)
        words.close()
        answers.close()


# -- the comparison ----------------------------------------------------------------------------------------------------


def largest_difference(theirs: Curve, ours: Curve, key: str) -> float:
    """The largest relative difference over all steps; infinite if one curve is shorter, 0 where TRL has no value."""
    if len(theirs) != len(ours):
        return math.inf
    pairs = [(a[key], b[key]) for a, b in zip(theirs, ours, strict=True) if a[key] is not None]
    return max((relative_difference(*pair) for pair in pairs), default=0.0)


def distance(theirs: Curve, ours: Curve) -> float:
    """How far two curves are apart, in units of what float32 allows: up to 1 they are the same."""
    return max(largest_difference(theirs, ours, key) / bound for key, bound in SAME_CURVE.items())


def finite(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return value if math.isfinite(value) else None


def compare_tokens(sides: Sides, theirs: Sequence[Mapping[str, Any]], file: Path) -> dict[str, Any]:
    """Compare each row's tokens and masks; write the recipe's documents, as TRL takes tokens, to `file`.

    Returns the numbers of rows compared and differing in tokens or in mask alone, the first difference, and some texts.
    """
    from finetune.model.build import load_tokenizer
    from finetune.report.preview import pieces
    from finetune.tokens.encoder import IGNORE, Document
    from finetune.tokens.tokenizer import TextTokenizer

    texts, pool = TextTokenizer(load_tokenizer(sides.recipe)), sides.prepared.pool
    ours: dict[int, RowDocuments] = {}
    for number, line in enumerate(pool.stores[0].lines):
        parts = [(ids.tolist(), (labels != IGNORE).tolist()) for ids, labels in pool.documents(number)]
        ours.setdefault(int(line) - 1, []).extend(parts)
    as_rows = [
        row_for_trl(ours.get(number, []), row) for number, row in enumerate(read_lines(Path(sides.setting["rows"])))
    ]
    file.write_text(json.dumps(as_rows), "utf-8")

    def shown(documents: RowDocuments) -> str:
        parts = []
        for ids, mask in documents:
            labels = [token if supervised else IGNORE for token, supervised in zip(ids, mask, strict=True)]
            each = (
                f"⟦{piece.text}⟧" if piece.learned else piece.text for piece in pieces(texts, Document(ids, labels))
            )
            parts.append("".join(each).replace("⟧⟦", ""))
        return "\n".join(parts)

    # No side predicts a first token, whatever its mask says.
    found: dict[int, RowDocuments] = {
        row["row"]: [(ids, [False, *mask[1:]]) for ids, mask in row["documents"]] for row in theirs
    }
    rows = [row for row in dict.fromkeys(sides.asked["rows"]) if row in found]
    lost = len({*sides.asked["rows"]}) - len(rows) if theirs else 0
    result: dict[str, Any] = {
        "rows": len(rows),
        "lost": lost,
        "tokens": 0,
        "mask": 0,
        "first": "",
        "is_blank": not lost,
    }
    for row in rows:
        if found[row] == ours[row]:
            continue
        has_other_tokens = [ids for ids, _ in found[row]] != [ids for ids, _ in ours[row]]
        result["tokens" if has_other_tokens else "mask"] += 1
        pairs = zip(found[row], ours[row], strict=False)
        apart = [
            token for (ids, mask), (_, own) in pairs for token, a, b in zip(ids, mask, own, strict=False) if a != b
        ]
        result["is_blank"] &= not has_other_tokens and not texts.decode(apart).strip()
        result["first"] = result["first"] or first_difference(found[row], ours[row], texts.decode)
    result["texts"] = [{"row": row + 1, "theirs": shown(found[row]), "ours": shown(ours[row])} for row in rows[:TEXTS]]
    return result


def row_for_trl(documents: RowDocuments, row: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the recipe as TRL's trainers take tokens."""
    if not documents:
        return {}
    ids, mask = documents[0]
    if "label" not in row and len(documents) == 1:
        return {"input_ids": ids, "labels": [token if on else -100 for token, on in zip(ids, mask, strict=True)]}
    start = mask.index(True)
    # Without what follows the last supervised token: TRL supervises all that it is given.
    answers = [each[start : len(on) - on[::-1].index(True)] for each, on in documents]
    prompt: dict[str, Any] = {"prompt_ids": ids[:start]}
    if len(answers) == 2:
        return prompt | {"chosen_ids": answers[0], "rejected_ids": answers[1]}
    return prompt | {"completion_ids": answers[0], "label": row["label"]}


def first_difference(theirs: RowDocuments, ours: RowDocuments, decode: Callable[[list[int]], str]) -> str:
    """Where two rows begin to differ, and how each side goes on there."""
    for (their_ids, their_mask), (own_ids, own_mask) in zip(theirs, ours, strict=False):
        pairs = list(zip_longest(zip(their_ids, their_mask, strict=True), zip(own_ids, own_mask, strict=True)))
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            continue
        texts = [decode(ids[place : place + 8]) for ids in (their_ids, own_ids)]
        if texts[0] == texts[1]:
            by = "TRL alone" if their_mask[place] else "the recipe alone"
            return f"token {place + 1} and the next, {texts[0]!r}, supervised by {by}"
        return f"from token {place + 1} on {texts[0]!r} by TRL, {texts[1]!r} by the recipe"
    return "another number of documents"


def possible_causes(
    imported: Imported, sides: Sides, first: Mapping[str, Any], ours: Curve, tokens: Mapping[str, Any]
) -> list[Cause]:
    """Everything that may differ here, the broadest first, because `find_causes` switches it on again first."""
    config, theirs, in_force = sides.setting["config"], first["steps"], first["effective"]
    remarked = {entry.key.partition(".")[0] for entry in imported.left_out if entry.level != "same"}
    causes: list[Cause] = []

    def add(text: str, off: dict[str, Any], *keys: str, said: bool = False) -> None:
        causes.append(Cause(text, off, said or any(key in remarked for key in keys)))

    if count := tokens["lost"] or tokens["tokens"] or tokens["mask"]:
        what = "tokens" if tokens["tokens"] else "masks"
        text = f"{what} of {count} of {tokens['rows']} rows: {tokens['first']}"
        if tokens["lost"]:
            text = f"rows: TRL leaves out {count} that the recipe trains on"
        documents = {"documents": str(Path(sides.setting["rows"]).with_name("documents.json"))}
        # What the import remarks on: blanks after an end of turn; rows with a completion; keys that change the tokens.
        keys = ["truncation_mode", "eos_token", "chat_template_path"]
        if tokens["is_blank"]:
            keys = ["chat_template"]
        elif "completion" in read_lines(Path(sides.setting["rows"]))[0]:
            keys.append("completion_only_loss")
        elif sides.setting["trainer"] == "CPO":
            keys.append("loss_type")
        add(text, documents, *keys)
    if in_force["packing"]:
        add("packing: TRL's packed documents see each other", {"config": {"packing": False}}, "packing")
    micro, accumulated = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    # Remarks on these keys are about means. SFT's loss_type is about the loss itself.
    means = {"loss_type", "loss_weights", "rpo_alpha", "sft_weight", "cpo_alpha", "per_device_train_batch_size"}
    if sides.setting["trainer"] == "SFT":
        means.remove("loss_type")
    is_kto, size = sides.setting["trainer"] == "KTO", micro * accumulated
    if accumulated > 1 or is_kto:
        off: dict[str, Any] = {"config": {"per_device_train_batch_size": size, "gradient_accumulation_steps": 1}}
        text = f"mean of each micro-batch ({micro} rows), then of {accumulated}; the recipe's is over the step"
        if is_kto:  # its prompts get the answer before theirs in the micro-batch, the recipe's the next in the step
            text = (
                "KL baseline over each micro-batch, with the answer before; the recipe's over the step, with the next"
            )
            taken = sides.asked["rows"]
            off["rows"] = [row for at in range(0, len(taken), size) for row in reversed(taken[at : at + size])]
        add(
            text,
            off,
            "loss_type",
            "loss_weights",
            "rpo_alpha",
            "sft_weight",
            "cpo_alpha",
            "per_device_train_batch_size",
        )
    if in_force["weight_decay"]:
        add("weight decay: the recipe's is of matrices alone", {"decay_matrices": True})
    if largest_difference(theirs, ours, "learning_rate") > SAME_CURVE["learning_rate"]:
        rates = [", ".join(f"{step['learning_rate']:.3g}" for step in curve[:3]) for curve in (theirs, ours)]
        text = f"learning rates: {rates[0]}, ... by TRL; {rates[1]}, ... by the recipe"
        warms_up = theirs[0]["learning_rate"] == 0.0  # every recipe's header says so
        off = {"rates": [step["learning_rate"] for step in ours]}
        add(text, off, "lr_scheduler_type", "lr_scheduler_kwargs", said=warms_up)
    dumped = sides.recipe.model_dump(mode="json")
    for key, name in VALUE_KEYS.items():
        part, _, last = name.format(objective=sides.recipe.training.objective).partition(".")
        own = (dumped.get(part) or {}).get(last, in_force[key])
        own = own or 0  # max_grad_norm: null
        if key == "lora_dropout" or in_force[key] is None or own == in_force[key]:
            continue
        place = "lora" if key in LORA else "config"
        add(f"{key}: {in_force[key]} by TRL, {own} in the recipe", {place: {key: own}}, key)
    for entry in imported.left_out:
        name = FORMER.get(entry.key, entry.key)
        if entry.level == "differs" and name in config and entry.key not in means:
            add(f"{entry.key}: {one_line(entry.value, 40)}: {entry.reason}", {"config": {name: None}}, entry.key)
    return causes


def find_causes(
    ask: Callable[[Mapping[str, Any]], dict[str, Any]], asked: Mapping[str, Any], causes: Sequence[Cause],
    theirs: Curve, ours: Curve,
) -> tuple[list[dict[str, Any]], bool]:  # fmt: skip
    """The causes without which the curves are the same, and whether they are.

    All are switched off. Then each is switched on again, and is no cause if the curves stay as near.
    """
    if distance(theirs, ours) <= 1:
        return [], True

    def curve_without(off: Sequence[Cause]) -> Curve:
        request = dict(asked)
        for cause in off:
            for key, value in cause.off.items():
                request[key] = request.get(key, {}) | value if isinstance(value, dict) else value
        steps: Curve = ask(request).get("steps", [])  # none if that cannot be trained: infinitely far
        return steps

    found: list[dict[str, Any]] = []
    kept = list(causes)
    nearest = distance(curve_without(kept) if kept else theirs, ours)
    for cause in causes if nearest > 1 else ():  # one that leads away from the recipe would hide the others
        others = [other for other in kept if other is not cause]
        if (nearer := distance(curve_without(others), ours)) < 0.9 * nearest:
            kept, nearest = others, nearer
    for cause in list(kept):
        others = [other for other in kept if other is not cause]
        curve = curve_without(others) if others else theirs
        if distance(curve, ours) <= max(1.0, 1.1 * nearest):
            kept = others
        else:
            found.append(
                {"cause": cause.text, "said": cause.said, "moves": finite(largest_difference(curve, ours, "loss"))}
            )
    return found, nearest <= 1


def proof_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report for a terminal."""
    from finetune.measure.metrics import sparkline

    yield f"{report['trainer']}, and the recipe: {report['steps']} steps of {report['rows_a_step']} rows on this CPU"
    yield from (f"  {note}" for note in report["notes"])
    for key, largest in report["largest_difference"].items():
        for side, title in TITLES.items():
            values = [step[key] for step in report[side] if step[key] is not None]
            shown = f"{values[0]:<10.5g} {sparkline(values)} {values[-1]:.5g}" if values else "not computed"
            yield f"{key.replace('_', ' '):<14} {title:<7} {shown}"
        if largest is not None:
            yield f"{'':<14} largest relative difference {largest:.1e}"
    yield "Supervised text is in ⟦⟧."
    for text in report["texts"]:
        is_same = text["theirs"] == text["ours"]
        for side, title in {"ours": "both"}.items() if is_same else TITLES.items():
            yield f"row {text['row']}, {title}: {without_controls(text[side])}"
    for difference in report["differences"]:
        said = "the recipe says so" if difference["said"] else "NOT said in the recipe"
        moves = f", moves the loss by {difference['moves']:.1e}" if difference["moves"] is not None else ""
        yield f"different ({said}{moves}): {without_controls(difference['cause'])}"
    if not report["explained"]:
        yield "different: not explained"
    if report["same"]:
        yield "Both train the same."
    else:
        yield f"They train differently{', as the recipe says' if report['ok'] else ''}."
