"""`finetune import FILE --prove`: the foreign configuration by its own trainer, and our recipe, step by step.

Both begin with the same small model and take the same rows in one order, in float32. If their curves differ, each
possible cause is switched off in the tool's own training. A cause is one without which the curves stay apart.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.sources import resolve
from finetune.errors import EnvironmentMismatch, FinetuneError
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
from finetune.recipe.optimizers import OPTIMIZER_NAMES
from finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from finetune.tokens.dataset import Prepared

CHILD = PACKAGE / "preflight" / "foreign_trainer.py"
STEPS, ROWS, TEXTS = 20, 64, 3
MICRO_BATCH, ROWS_A_STEP, LONGEST, PHASE = 4, 8, 384, 4  # at most; a phase of the schedule has so many steps
RATE = 1e-3  # both sides' highest rate at least: with 1e-6 twenty steps would show nothing
WALL_SECONDS = 600  # of one question to the child
# Largest relative differences of two trainings that compute the same: float32, summed in another order.
SAME = {"loss": 1e-4, "grad_norm": 1e-3, "learning_rate": 1e-5}
STAND_IN = "HuggingFaceTB/SmolLM2-135M"  # a Llama, for a model of which this machine has no configuration

# All that passes from the foreign file: numbers, switches, and words from the trainer's own lists.
NUMBERS = (
    "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm warmup_steps warmup_ratio "
    "label_smoothing_factor neftune_noise_alpha max_length beta label_smoothing desirable_weight undesirable_weight "
    "loss_weights rpo_alpha ld_alpha cpo_alpha simpo_gamma alpha router_aux_loss_coef seed lora_r lora_alpha lora_dropout"
).split()  # fmt: skip
SWITCHES = (
    "packing assistant_only_loss completion_only_loss disable_dropout use_weighting average_tokens_across_devices "
    "use_rslora use_dora"
).split()
WORDS = (
    "lr_scheduler_type loss_type packing_strategy truncation_mode f_divergence_type dataset_text_field "
    "lora_target_modules lora_modules_to_save"
).split()
OF_LORA = ("lora_r", "lora_alpha", "lora_target_modules", "lora_modules_to_save", "use_rslora", "use_dora")
RENAMED = {"max_seq_length": "max_length", "model_max_length": "max_length"}
PLAIN_OPTIMIZERS = ("adafactor", "sgd", "adagrad", "rmsprop")
# The trainer's key -> the recipe's, where both have the value itself.
VALUES = {
    **{key: f"training.{key}" for key in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")},
    "beta": "{objective}.beta",
    "label_smoothing": "dpo.label_smoothing",
    "simpo_gamma": "dpo.simpo_gamma",
    "desirable_weight": "kto.desirable_weight",
    "undesirable_weight": "kto.undesirable_weight",
    **{key: f"lora.{key}" for key in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
    "lora_r": "lora.r",
}
Request = dict[str, Any]
Curve = list[dict[str, Any]]


@dataclass(frozen=True)
class Cause:
    """A possible reason for different curves, and the request that switches it off in the tool's training."""

    text: str
    off: Request
    said_by: tuple[str, ...] = ()  # keys of the foreign file whose remark in the recipe says it
    said: bool = False  # the recipe's header says it
    moves: float = field(default=0.0, compare=False)  # the largest relative difference of the losses with it alone


@dataclass(frozen=True)
class Sides:
    """The small training of both sides."""

    recipe: Recipe
    words: tuple[str, ...]  # overrides of the imported recipe
    setting: Request
    base: Request  # the tool's training as its configuration says
    notes: tuple[str, ...]
    prepared: Prepared
    order: list[int]  # numbers of rows.jsonl, as both take them


def prove_import(
    file: Path, *, tool: Tool | None, gpus: str | None, python: Path | None, log: Callable[[str], None]
) -> dict[str, Any]:
    """Train both sides, compare them and find the causes. Returns the report; docs/guide.md has its keys.

    `exit_code` is 0 if both train the same, or the recipe says of each difference that it is there; else 4. Raises
    FinetuneError for a file that cannot be tried.
    """
    imported = convert(file, tool=tool, gpus=gpus)
    if imported.tool != "trl":
        title = TOOL_TITLES[imported.tool]
        raise FinetuneError(f"{file}: --prove trains TRL's configurations; {title}'s own trainer has not been tried")
    for key in ("train_file", "block_size"):
        if key in imported.values:
            raise FinetuneError(f"{file}: {key}: is run_clm's, a script in no package; --prove has not been tried with it")
    if python is not None and not os.access(python, os.X_OK):
        raise FinetuneError(f"--python: {python}: is no program; name the interpreter of the environment with TRL")
    with tempfile.TemporaryDirectory(prefix="finetune-prove-") as name, ended_by_signals(), cache_in(Path(name)):
        folder = Path(name)
        log("making both trainings small")
        sides = make_small(imported, folder)
        log("training the recipe")
        ours = train_recipe(sides, folder)
        with ForeignTrainer(python or Path(sys.executable), sides.setting, folder) as trainer:
            log(f"training by TRL {trainer.version}")
            first = trainer.ask(sides.base | {"show": True})
            if "error" in first:
                trained_by = f"TRL {trainer.version}'s own {sides.setting['trainer']}Trainer"
                raise FinetuneError(f"{file}: {trained_by} refuses it: {one_line(first['error'])}; correct the file")
            tokens = compare_tokens(sides, first["documents"], folder)
            causes = possible_causes(imported, sides, first, ours, tokens)
            log("comparing")
            found, is_explained = find_causes(trainer, sides.base, causes, first["steps"], ours)
    return report(imported, sides, trainer.version, first, ours, tokens, found, is_explained)


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Keep tokens and results of trials in the temporary folder, not in the user's cache."""
    before = os.environ.get("FINETUNE_CACHE")
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ["FINETUNE_CACHE"]
        else:
            os.environ["FINETUNE_CACHE"] = before


# -- both trainings, small ---------------------------------------------------------------------------------------------


def make_small(imported: Imported, folder: Path) -> Sides:
    """The model, its start, the rows and their order, for both sides. Raises FinetuneError."""
    from finetune.model.build import load_tokenizer
    from finetune.tokens.batches import rows_of_step
    from finetune.tokens.dataset import prepare

    (page := folder / "recipe.yaml").write_text(imported.text, "utf-8")
    recipe, values = load_recipe(page).recipe, imported.values
    objective = recipe.training.objective
    entry, notes = write_rows(recipe, values, folder)
    rows = RecipeChange({"data.train": [entry], "data.eval": None, "data.max_length": min(LONGEST, recipe.data.max_length)})
    name = recipe.model.name_or_path
    if config_here(name, recipe.model.revision) is None:
        notes.append(f"model: a Llama instead of {name}, whose configuration is not on this machine")
        name = STAND_IN
    with silenced():
        data = load_recipe(page, overrides([rows])).recipe.data
        base = folder_of(name, recipe.model.revision)
        tokenizer = load_tokenizer(recipe) if base and (base / "tokenizer.json").is_file() else None
        model = shrink_model(name, recipe.model.revision, data, folder / "model", tokenizer=tokenizer)
        if tokenizer is None and values.get("assistant_only_loss"):
            mark_answers(folder / "model")
    notes.append(f"model: {model.architecture} of {model.parameters:,} random weights, float32 on both sides")
    if tokenizer is None:
        notes.append(f"tokenizer: {model.vocabulary} tokens learned from the rows, with a ChatML template")

    # Each side's batch from its own keys, so that a batch carried over wrongly shows.
    micro = min(MICRO_BATCH, recipe.training.rows_at_once)
    replicas = max(1, recipe.budget.gpus * recipe.budget.nodes)
    accumulated = max(1, recipe.training.global_batch_size // (recipe.training.rows_at_once * replicas))
    batch = micro * min(accumulated, ROWS_A_STEP // micro)
    factor = max(1.0, RATE / recipe.training.learning_rate)
    if factor > 1:
        notes.append(f"learning rate: {factor:.3g} times as high on both sides, so that {STEPS} steps show something")
    arguments = {key: short(key, value) for key, value in recipe.training.lr_scheduler_kwargs.items()}
    settings: dict[str, Any] = {
        "accelerate_config": "single", "budget": {"gpus": 0}, "model.name_or_path": str(model.folder),
        "model.revision": "main", "model.dtype": "float32", "model.attention": "auto", "quantization": None,
        "training.mixed_precision": "no", "training.pure_bf16": False, "training.optim": "adamw",
        "training.activation_checkpointing": False, "training.compile": False, "training.max_steps": STEPS,
        "training.learning_rate": recipe.training.learning_rate * factor, "training.lr_scheduler_kwargs": arguments,
        "training.warmup_steps": short("warmup_steps", recipe.training.warmup_steps), "training.resume": "never",
        "training.global_batch_size": batch, "training.per_device_batch_size": micro,
        "training.early_stopping_patience": None, "training.load_best_model_at_end": False, "hub": {}, "report_to": [],
        "logging_steps": 1, "save_steps": STEPS, "eval_steps": STEPS, "samples.count": 0, "measure_phases": False,
    }  # fmt: skip
    if recipe.quantization is not None:
        notes.append("quantization: none on both sides")
    if recipe.lora is not None:
        settings["lora.lora_dropout"] = 0.0
        if recipe.lora.lora_dropout:
            notes.append("lora_dropout: 0 on both sides, because its random numbers differ")
    small = load_recipe(page, overrides([rows, RecipeChange(settings)])).recipe
    setting = foreign_setting(imported, small, model.folder, folder, factor, notes)
    if small.lora is not None:
        settings["model.adapter"] = str(write_adapters(small, folder))
        setting["adapter"] = str(folder / "adapter" / "adapter_model.safetensors")
    with silenced():
        prepared = prepare(small, load_tokenizer(small))
    asked: Request = {}
    order = [int(prepared.split.train[row]) for row in range(len(prepared.split.train))]
    if small.data.packing and objective == "supervised":
        settings["training.global_batch_size"] = len(prepared.train)
        asked["all_rows"] = True  # packed rows are filled differently; each step takes all of them
        notes.append("packing: each step takes all rows, because each side fills packed rows with other documents")
    else:
        taken = {"rows": len(order), "global_batch_size": batch, "seed": small.training.seed, "total_rows": STEPS * batch}
        order = [order[row] for step in range(STEPS) for row in rows_of_step(step, **taken)]
    lines = prepared.pool.stores[0].lines
    order = [int(lines[document]) - 1 for document in order]
    words = tuple(overrides([rows, RecipeChange(settings)]))
    return Sides(small, words, setting, asked | {"rows": order}, tuple(notes), prepared, order)


def short(key: str, value: Any) -> Any:
    """A schedule's number of steps, at most PHASE; other values stay."""
    if "steps" in key or key == "timescale":
        return value if value is None or value < 1 else min(int(value), PHASE)
    return value


def write_rows(recipe: Recipe, values: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write rows.jsonl from the file's local data, else from sample chats. Returns its entry and notes."""
    file, objective, entries = folder / "rows.jsonl", recipe.training.objective, recipe.data.train
    entry: dict[str, Any] = {"path": "json", "data_files": str(file)}
    local = [source for source in map(resolve, entries) if source.kind != "hub"]
    if local:
        turns = zip_longest(*(source.rows() for source in local))
        found = (row for turn in turns for row in turn if row is not None and row.values is not None)
        rows = [row.values for row in islice(found, ROWS)]
        kept = entries[0].model_dump(exclude_defaults=True)
        entry |= {key: kept[key] for key in ("format", "columns", "roles", "chat_template_kwargs") if key in kept}
        notes = [f"rows: {len(rows)} of {', '.join(source.name for source in local)}"]
    else:
        if objective != "supervised":
            layout: Any = "kto" if objective == "kto" else "preference"
            sample, entry["format"] = sample_preferences(layout, folder), layout
        else:
            sample = SAMPLE_CHAT
        rows = [json.loads(line) for line in sample.read_text("utf-8").splitlines()]
        if values.get("completion_only_loss"):
            rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
        named = ", ".join(each.path for each in entries)
        notes = [f"rows: {len(rows)} of data/sample_chat.jsonl instead of {named}, which is not on this machine"]
    file.write_text("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows), "utf-8")
    return entry, notes


def mark_answers(model: Path) -> None:
    """Mark the answers in the small tokenizer's template, as TRL's assistant_only_loss needs it."""
    start, body = CHAT_TEMPLATE.index("{%- if message['reasoning"), CHAT_TEMPLATE.index("{{- '<|im_end|>")
    turn = CHAT_TEMPLATE[start:body] + "{{- '<|im_end|>' }}"
    marked = "{%- if message['role'] == 'assistant' %}{% generation %}" + turn + "{% endgeneration %}{%- else %}"
    rest = CHAT_TEMPLATE[body:].replace("'<|im_end|>\n'", "'\n'")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE[:start] + marked + turn + "{%- endif %}" + rest, "utf-8")


def write_adapters(recipe: Recipe, folder: Path) -> Path:
    """The recipe's adapters as they start, saved, so that both sides begin with them."""
    import torch

    from finetune.model.build import build_model

    with silenced(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.training.seed)
        model: Any = build_model(recipe, torch.device("cpu"))
        model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return folder / "adapter"


def foreign_setting(
    imported: Imported, small: Recipe, model: Path, folder: Path, factor: float, notes: list[str]
) -> Request:
    """What the child is told: of the foreign file only what `passed` lets through."""
    objective, values = small.training.objective, imported.values
    config = dict(passed(values))
    optimizer = str(values.get("optim") or "adamw_torch")
    config["optim"] = optimizer if optimizer in PLAIN_OPTIMIZERS else "adamw_torch"
    if optimizer not in (*PLAIN_OPTIMIZERS, "adamw_torch", "adamw_torch_fused"):
        known = "its state is not float32 here" if optimizer in OPTIMIZER_NAMES else "it has not been tried"
        notes.append(f"optim: AdamW on both sides instead of {one_line(optimizer, 40)}; {known}")
    micro = min(MICRO_BATCH, whole(values.get("per_device_train_batch_size"), 8))
    accumulated = whole(values.get("gradient_accumulation_steps"), 1)
    config |= {
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": min(accumulated, ROWS_A_STEP // micro),
        "max_length": min(LONGEST, config.get("max_length") or 1024), "warmup_steps": short("steps", config.get("warmup_steps")),
    }  # fmt: skip
    shapes = values.get("lr_scheduler_kwargs")
    if isinstance(shapes, dict):
        config["lr_scheduler_kwargs"] = {key: short(key, value) for key, value in shapes.items() if is_number(value)}
    trainer = {"supervised": "SFT", "dpo": "DPO", "kto": "KTO"}[objective]
    if objective == "dpo" and small.dpo.loss_type == "simpo":
        trainer = "CPO"
    fixed: Request = {
        "output_dir": str(folder / "theirs"), "use_cpu": True, "bf16": False, "fp16": False, "report_to": [],
        "save_strategy": "no", "logging_strategy": "steps", "logging_steps": 1, "max_steps": STEPS, "disable_tqdm": True,
        "train_sampling_strategy": "sequential", "gradient_checkpointing": False, "activation_checkpointing": False,
        "push_to_hub": False, "shuffle_dataset": False,
    }  # fmt: skip
    lora = {key: config.pop(key) for key in (*OF_LORA, "lora_dropout") if key in config}
    return {
        "trainer": trainer, "model": str(model), "rows": str(folder / "rows.jsonl"), "config": config, "fixed": fixed,
        "lora": (lora if values.get("use_peft") else None), "rate_factor": factor, "effective": [*VALUES, "packing"],
        "chat_template": template_of(values),
    }  # fmt: skip


def passed(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The foreign keys that pass, each with a value of its kind."""
    for key, value in values.items():
        name = RENAMED.get(key, key)
        each = value if isinstance(value, list) else [value]
        is_plain = all(isinstance(one, str) and re.fullmatch(r"[\w.-]{1,100}", one) for one in each)
        if (
            (name in NUMBERS and all(map(is_number, each)))
            or (name in SWITCHES and isinstance(value, bool))
            or (name in WORDS and value and is_plain)
        ):
            yield name, value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def whole(value: Any, default: int) -> int:
    """A count of the foreign file, which the import has checked; its default for "auto" and for none."""
    return int(value) if is_number(value) else default


def template_of(values: Mapping[str, Any]) -> str | None:
    """The text of the foreign file's chat template. The recipe's own training has tried it in a child before."""
    template = values.get("chat_template") or values.get("chat_template_path")
    if not isinstance(template, str) or (not template.endswith(".jinja") and "{" not in template):
        return None
    return template if "{" in template else read_regular(Path(template), 2**20).decode("utf-8")


# -- the trainings -----------------------------------------------------------------------------------------------------


def train_recipe(sides: Sides, folder: Path) -> Curve:
    """The recipe's curve, by a real launch. Raises FinetuneError with the run's own reason."""
    job = TrainingJob(folder / "recipe.yaml", sides.words, 1, folder)
    try:
        with started(job) as process:
            wait_for_end(job, process)
    except StepFailed as error:
        raise FinetuneError(f"the imported recipe does not train: {error}") from None
    return [{key: line[key] for key in SAME} for line in train_lines(job.run_dir)]


class ForeignTrainer:
    """The child that trains by the tool: offline, in the temporary folder, without the user's environment."""

    def __init__(self, python: Path, setting: Request, folder: Path) -> None:
        kept = {key: os.environ[key] for key in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH") if key in os.environ}
        home = folder / "home"
        home.mkdir()
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
        environment = kept | offline | {
            "HOME": str(home), "TMPDIR": str(home), "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache"),
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        self._log, self._setting = folder / "theirs.log", setting
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                with_parent([str(python), "-I", str(CHILD)]), env=environment, cwd=home, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self.version = ""

    def __enter__(self) -> ForeignTrainer:
        answer = self.ask(self._setting)
        if "error" in answer:
            self.__exit__()
            raise EnvironmentMismatch(
                f"--prove: TRL {answer['error']}; install it: pip install 'finetune[bench]', or name an interpreter "
                "that has it by --python"
            )
        self.version = answer["version"]
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(self._process)

    def ask(self, request: Request) -> dict[str, Any]:
        """The child's answer to one request. Raises FinetuneError if it does not answer in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(WALL_SECONDS, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            reason = failure_reason(None, self._log.read_text("utf-8", errors="replace"))
            raise FinetuneError(f"--prove: TRL's process ended: {reason}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# -- the comparison ----------------------------------------------------------------------------------------------------


def largest_difference(theirs: Curve, ours: Curve, key: str = "loss") -> float:
    """The largest relative difference over all steps; infinite for another number of steps."""
    if len(theirs) != len(ours):
        return float("inf")
    pairs = [(a[key], b[key]) for a, b in zip(theirs, ours, strict=True) if a[key] is not None or key == "loss"]
    return max((relative_difference(a, b) for a, b in pairs), default=0.0)


def distance(theirs: Curve, ours: Curve) -> float:
    """How far two curves are apart, in units of what float32 allows: up to 1 they are the same."""
    return max(largest_difference(theirs, ours, key) / bound for key, bound in SAME.items())


def compare_tokens(sides: Sides, theirs: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """The supervised text of some rows from each side, and how many rows differ in tokens or in mask alone."""
    from finetune.model.build import load_tokenizer
    from finetune.report.preview import pieces
    from finetune.tokens.encoder import IGNORE, Document
    from finetune.tokens.tokenizer import TextTokenizer

    texts = TextTokenizer(load_tokenizer(sides.recipe))

    def marked(documents: Sequence[tuple[list[int], list[bool]]]) -> str:
        whole_text = ""
        for ids, supervised in documents:
            labels = [token if learned else IGNORE for token, learned in zip(ids, supervised, strict=True)]
            shown = "".join(
                f"⟦{piece.text}⟧" if piece.learned else piece.text for piece in pieces(texts, Document(ids, labels))
            )
            whole_text += ("\n" if whole_text else "") + shown.replace("⟧⟦", "")
        return whole_text

    pool = sides.prepared.pool
    ours: dict[int, list[tuple[list[int], list[bool]]]] = {}
    for document in range(len(pool.lengths)):
        parts = [(ids.tolist(), (labels != IGNORE).tolist()) for ids, labels in pool.documents(document)]
        ours.setdefault(int(pool.stores[0].lines[document]) - 1, []).extend(parts)
    if theirs:
        write_documents(ours, sides, folder / "documents.json")
    found: dict[str, Any] = {"rows": 0, "tokens": 0, "mask": 0, "first": "", "texts": [], "lost": 0}
    seen = {row["row"]: [(part["ids"], part["supervised"]) for part in row["documents"]] for row in theirs}
    for row in dict.fromkeys(sides.order):
        if row not in seen:
            found["lost"] += bool(theirs)
            continue
        found["rows"] += 1
        other, own = seen[row], ours[row]
        kind = ""
        if [ids for ids, _ in other] != [ids for ids, _ in own]:
            kind = "tokens"
        # A first token is never predicted, whatever its mask says.
        elif [mask[1:] for _, mask in other] != [mask[1:] for _, mask in own]:
            kind = "mask"
        if kind:
            found[kind] += 1
            found["first"] = found["first"] or in_words(kind, other, own, texts.decode)
        if len(found["texts"]) < TEXTS:
            found["texts"].append({"row": row + 1, "theirs": marked(other), "ours": marked(own)})
    return found


def write_documents(ours: Mapping[int, list[tuple[list[int], list[bool]]]], sides: Sides, file: Path) -> None:
    """The recipe's documents as the tool's trainer takes tokens, one for each row of rows.jsonl."""
    rows = [json.loads(line) for line in Path(sides.setting["rows"]).read_text("utf-8").splitlines()]
    documents: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        parts = ours.get(number, [([], [])])
        ids, supervised = parts[0]
        if sides.setting["trainer"] == "SFT":
            labels = [token if learned else -100 for token, learned in zip(ids, supervised, strict=True)]
            documents.append({"input_ids": ids, "labels": labels})
            continue
        prompt = supervised.index(True) if True in supervised else len(ids)
        answers = [each[0][prompt:] for each in parts]
        names = ("chosen_ids", "rejected_ids") if len(answers) > 1 else ("completion_ids",)
        document = {"prompt_ids": ids[:prompt]} | dict(zip(names, answers, strict=True))
        documents.append(document | ({"label": row["label"]} if "label" in row else {}))
    file.write_text(json.dumps(documents), "utf-8")


def in_words(kind: str, theirs: Any, ours: Any, decode: Callable[[list[int]], str]) -> str:
    """The first difference of one row: another token, or a stretch that one side alone supervises."""
    for (their_ids, their_mask), (own_ids, own_mask) in zip(theirs, ours, strict=False):
        if kind == "mask":
            stretches = []
            for side, mask, other in (("TRL", their_mask, own_mask), ("the recipe", own_mask, their_mask)):
                alone = [token for token, a, b in zip(own_ids, mask, other, strict=True) if a and not b]
                if alone:
                    stretches.append(f"{side} alone supervises {len(alone)} tokens, {decode(alone[:16])!r}")
            if stretches:
                return "; ".join(stretches)
            continue
        length = next((k for k, (a, b) in enumerate(zip(their_ids, own_ids, strict=False)) if a != b), None)
        if length is None and len(their_ids) == len(own_ids):
            continue
        place = min(len(their_ids), len(own_ids)) if length is None else length
        sides = (decode(ids[place : place + 8]) for ids in (their_ids, own_ids))
        return "token {}: {!r} by TRL, {!r} by the recipe".format(place + 1, *sides)
    return "another number of documents"


def possible_causes(
    imported: Imported, sides: Sides, first: Mapping[str, Any], ours: Curve, tokens: Mapping[str, Any]
) -> list[Cause]:
    """Everything that may differ here, the broadest first: it is switched on again first."""
    config, trainer = sides.setting["config"], sides.setting["trainer"]
    micro, accumulated = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    causes: list[Cause] = []
    if tokens["tokens"] or tokens["mask"]:
        what = "tokens" if tokens["tokens"] else "supervised tokens (mask)"
        count = tokens["tokens"] or tokens["mask"]
        said_by = ("completion_only_loss", "truncation_mode", "eos_token", "chat_template", "chat_template_path")
        documents = str(Path(sides.setting["rows"]).with_name("documents.json"))
        text = f"{what} differ in {count} of {tokens['rows']} rows: {tokens['first']}"
        causes.append(Cause(text, {"documents": documents}, said_by))
    if first["effective"].get("packing"):
        text = "packing: TRL's packed documents see each other"
        causes.append(Cause(text, {"config": {"packing": False}}, ("packing", "packing_strategy")))
    if accumulated > 1 or trainer == "KTO":
        size = micro * accumulated
        off: Request = {"config": {"per_device_train_batch_size": size, "gradient_accumulation_steps": 1}}
        text = f"mean of each micro-batch of {micro} rows, then of {accumulated} micro-batches; the recipe's is of the step"
        if trainer == "KTO":  # its prompts get the answer before theirs, the recipe's the one after
            text = "KL baseline of each micro-batch, with the answer of the row before; the recipe's is of the step"
            steps = [sides.order[at : at + size] for at in range(0, len(sides.order), size)]
            off["rows"] = [row for step in steps for row in reversed(step)]
        keys = ("loss_type", "loss_weights", "rpo_alpha", "sft_weight", "cpo_alpha", "per_device_train_batch_size")
        causes.append(Cause(text, off, keys))
    if first["effective"].get("weight_decay"):
        causes.append(Cause("weight decay of other weights: the recipe's is of matrices", {"decay_matrices": True}))
    if largest_difference(first["steps"], ours, "learning_rate") > SAME["learning_rate"]:
        theirs, own = ([f"{step['learning_rate']:.3g}" for step in curve[:3]] for curve in (first["steps"], ours))
        rates = {"rates": [step["learning_rate"] for step in ours]}
        text = f"learning rate: {', '.join(theirs)} ... by TRL, {', '.join(own)} ... by the recipe"
        # The recipe's header says that warming up begins above 0.
        begins_at_0 = first["steps"][0]["learning_rate"] == 0.0 < ours[0]["learning_rate"]
        causes.append(Cause(text, rates, ("lr_scheduler_type", "lr_scheduler_kwargs"), said=begins_at_0))
    flat = load_values(sides.recipe)
    for key, name in VALUES.items():
        value = flat.get(name.format(objective=sides.recipe.training.objective))
        theirs_value = first["effective"].get(key)
        if value is None and key == "max_grad_norm":
            value = 0.0
        if value is None or theirs_value is None or value == theirs_value:
            continue
        section = "lora" if key.startswith(("lora_", "use_")) else "config"
        text = f"{key}: {theirs_value} by TRL, {value} in the recipe"
        causes.append(Cause(text, {section: {key: value}}, (key,)))
    for entry in imported.left_out:
        name = RENAMED.get(entry.key, entry.key)
        if entry.level == "differs" and name in config and name not in ("per_device_train_batch_size", "loss_weights"):
            text = f"{entry.key}: {one_line(entry.value, 40)}: {entry.reason}"
            causes.append(Cause(text, {"config": {name: None}}, (entry.key,)))
    return causes


def load_values(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values by dotted key, two levels deep."""
    dumped = recipe.model_dump(mode="json")
    sections = {name: section for name, section in dumped.items() if isinstance(section, dict)}
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def joined(base: Request, causes: Sequence[Cause]) -> Request:
    """The request with all these causes switched off."""
    result: Request = dict(base)
    for cause in causes:
        for key, value in cause.off.items():
            result[key] = {**result.get(key, {}), **value} if isinstance(value, dict) else value
    return result


def find_causes(
    trainer: ForeignTrainer, base: Request, causes: Sequence[Cause], theirs: Curve, ours: Curve
) -> tuple[list[Cause], bool]:
    """The causes without which the curves are the same, and whether they are then.

    All are switched off first. Then each is switched on again, and stays on if the curves stay as near as they were.
    """
    if distance(theirs, ours) <= 1:
        return [], True

    def tried(off: Sequence[Cause]) -> Curve:
        answer = trainer.ask(joined(base, off))
        return list(answer.get("steps", []))  # a training that fails is infinitely far

    kept = list(causes)
    nearest = distance(tried(kept), ours) if kept else distance(theirs, ours)
    found: list[Cause] = []
    for cause in causes:
        without = [other for other in kept if other is not cause]
        curve = tried(without) if without else theirs
        if distance(curve, ours) <= max(1.0, 1.1 * nearest):
            kept = without
        else:
            moves = largest_difference(curve, ours)
            found.append(Cause(cause.text, cause.off, cause.said_by, cause.said, moves))
    return found, nearest <= 1


def report(
    imported: Imported, sides: Sides, version: str, first: Mapping[str, Any], ours: Curve, tokens: Mapping[str, Any],
    found: Sequence[Cause], is_explained: bool,
) -> dict[str, Any]:  # fmt: skip
    """The report as JSON."""
    remarked = {entry.key.partition(".")[0] for entry in imported.left_out if entry.level != "same"}
    differences = [
        {"cause": cause.text, "said": cause.said or any(key in remarked for key in cause.said_by), "moves": cause.moves}
        for cause in found
    ]
    if first["adapters"]:
        sides_alone = "; ".join(f"{side} alone: {', '.join(names[:3])}" for side, names in first["adapters"].items())
        differences.append({"cause": f"adapters: {sides_alone}", "said": False, "moves": None})
    if tokens["lost"]:
        text = f"{tokens['lost']} rows that TRL leaves out"
        differences.append({"cause": text, "said": False, "moves": None})
    same = distance(first["steps"], ours) <= 1 and not differences
    said = is_explained and all(difference["said"] for difference in differences)
    notes = list(sides.notes)
    if first["unknown"]:
        notes.append(f"TRL {version} does not know {', '.join(first['unknown'])}: not passed")
    return {
        "ok": same or said,
        "same": same,
        "explained": is_explained,
        "trainer": f"TRL {version}, {sides.setting['trainer']}Trainer",
        "steps": STEPS,
        "rows_a_step": len(sides.order) if sides.base.get("all_rows") else sides.recipe.training.global_batch_size,
        "notes": notes,
        "theirs": first["steps"],
        "ours": ours,
        "largest_difference": {key: largest_difference(first["steps"], ours, key) for key in SAME},
        "texts": tokens["texts"],
        "differences": differences,
        **({} if same or said else {"exit_code": EnvironmentMismatch.exit_code}),
    }


def proof_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The report for a terminal."""
    from finetune.measure.metrics import sparkline

    yield f"{result['trainer']}, and the recipe: {result['steps']} steps of {result['rows_a_step']} rows on this CPU"
    yield from (f"  {note}" for note in result["notes"])
    for key, name in zip(SAME, ("loss", "gradient norm", "learning rate"), strict=True):
        for side, title in (("theirs", "TRL"), ("ours", "recipe")):
            values = [step[key] for step in result[side] if step[key] is not None]
            shown = f"{values[0]:<10.5g} to {values[-1]:<10.5g} {sparkline(values)}" if values else "not computed"
            yield f"{name:<14} {title:<7} {shown}"
        yield f"{'':<14} largest relative difference {result['largest_difference'][key]:.1e}"
    yield "Supervised text is in ⟦⟧."
    for text in result["texts"]:
        if text["theirs"] == text["ours"]:
            yield f"row {text['row']}, both: {without_controls(text['ours'])}"
        else:
            yield from (f"row {text['row']}, {name}: {without_controls(text[side])}" for side, name in SIDES)
    for difference in result["differences"]:
        said = "the recipe says so" if difference["said"] else "NOT said in the recipe"
        moves = f", moves the loss by {difference['moves']:.1e}" if difference["moves"] is not None else ""
        yield f"different ({said}{moves}): {without_controls(difference['cause'])}"
    if not result["explained"]:
        yield "different: not explained"
    verdict = "Both train differently."
    if result["same"]:
        verdict = "Both train the same."
    elif result["ok"]:
        verdict = "Both train the same, except for what the recipe says."
    yield verdict


SIDES = (("theirs", "TRL"), ("ours", "recipe"))
