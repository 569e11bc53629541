"""The typed recipe: sections, defaults and cross-checks. The only place where a default lives.

Keys carry Hugging Face's names where the meaning is the same. Nothing here imports torch, so that checking a
recipe stays instant. Field descriptions say meaning, unit and frame of reference; docs/recipe.md and the JSON
Schema are generated from them.
"""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from finetune.paths import in_home
from finetune.recipe import cross_checks
from finetune.recipe.optimizers import Optimizer

Dtype = Literal["bfloat16", "float16", "float32"]
Attention = Literal["auto", "varlen", "sdpa", "flex_attention", "flash_attention_2", "eager"]
KnownFormat = Literal["messages", "prompt_completion", "text", "alpaca", "sharegpt"]
RowFormat = Literal["auto", KnownFormat]
Role = Literal["system", "user", "assistant", "tool"]
TrainOn = Literal["assistant", "completion", "all"]
Truncation = Literal["error", "right", "drop"]
Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]
Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]
INITS = "peft's initialisation: true, gaussian, orthogonal, olora, pissa."

Local = Annotated[str, AfterValidator(in_home)]  # may be a path; ~ is the home folder
Count = Annotated[int, Field(ge=1)]
WholeNumber = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# Steps between two events, or their share of the run: of T steps, ceil(T x share), as transformers counts.
Interval = Count | Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Budget(Section):
    """What the recipe is made for."""

    gpus: WholeNumber = Field(0, description="GPUs per node; 0 means the CPU.")
    gpu_memory_gb: float = Field(0, ge=0, description="Memory of one GPU in GB as its maker states it.")
    nodes: Count = Field(1, description="Machines.")


class ModelSection(Section):
    """The base model."""

    name_or_path: Local = Field(
        min_length=1,
        description="Hub repository, local folder, or `package:NAME` for a model shipped inside an installed package.",
    )
    revision: str = Field("main", min_length=1, description="Branch, tag or commit on the Hub.")
    adapter: Local | None = Field(None, min_length=1, description="LoRA adapter to start from; a folder, or the Hub's.")
    adapter_revision: str = Field("main", min_length=1, description="Branch, tag or commit of an adapter on the Hub.")
    dtype: Dtype = Field("bfloat16", description="Number format of frozen base weights; trained weights are float32.")
    attention: Attention = Field("auto", description="auto: document-isolated variable-length attention.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model's repository.")


class Quantization(Section):
    """Quantised frozen base weights (bitsandbytes); needs `lora`."""

    load_in_4bit: bool = Field(False, description="4-bit base weights (QLoRA).")
    load_in_8bit: bool = Field(False, description="8-bit base weights (LLM.int8()).")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field("nf4", description="4-bit number format.")
    bnb_4bit_use_double_quant: bool = Field(True, description="Quantise the scales too: 0.37 bits a weight less.")
    bnb_4bit_compute_dtype: Dtype = Field("bfloat16", description="Number format the weights are multiplied in.")
    bnb_4bit_quant_storage: Literal["uint8", "bfloat16", "float16", "float32"] = Field(
        "uint8", description="Container of the packed weights; sharded strategies need the compute dtype here."
    )

    @model_validator(mode="after")
    def one_width(self) -> Quantization:
        cross_checks.check_width(self)
        return self


class Lora(Section):
    """Low-rank adapters; the keys are peft's own."""

    r: Count = Field(16, description="Rank.")
    lora_alpha: float = Field(32, gt=0, description="Scale; the update is multiplied by lora_alpha / r.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: str | Annotated[list[str], Field(min_length=1)] = Field(
        "all-linear", description="Layers that get an adapter: all-linear, a pattern, or a list of names."
    )
    modules_to_save: list[str] = Field([], description="Further modules trained in full and saved with the adapter.")
    use_rslora: bool = Field(False, description="Scale by lora_alpha / sqrt(r).")
    use_dora: bool = Field(False, description="Train magnitude and direction separately (DoRA).")
    # Not pissa_niter_[n]: peft draws another part of the base when it loads such an adapter, which fits none again.
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "olora", "pissa"] = Field(True, description=INITS)

    @model_validator(mode="after")
    def layers_by_name(self) -> Lora:
        cross_checks.check_target_modules(self)
        return self


class DataSet(Section):
    """One data set: load_dataset's arguments, plus how to read a row and how often."""

    path: Local = Field(min_length=1, description="json, csv, parquet, a local folder, or a Hub data set.")
    name: str | None = Field(None, description="Configuration of a Hub data set.")
    data_files: Local | list[Local] | None = Field(None, description="Local files, relative to the working folder.")
    split: str = Field("train", min_length=1, description="Split, slices allowed: train[:1000].")
    revision: str = Field("main", min_length=1, description="Branch, tag or commit on the Hub.")
    format: RowFormat = Field("auto", description="Layout of a row; auto looks at the columns.")
    columns: dict[str, str] = Field(
        {}, description="Our column to the data set's: {prompt: question, completion: answer}; others keep their names."
    )
    roles: dict[str, Role] = Field(
        {}, description="The data set's role names to ours: {Human: user}; those of messages and sharegpt are known."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Variables for the chat template: {enable_thinking: false}; a row's own column wins."
    )
    weight: float = Field(1.0, gt=0, le=1000, description="How often each row is seen an epoch; 0.5: half of the rows.")

    @model_validator(mode="after")
    def known_columns(self) -> DataSet:
        cross_checks.check_data_set(self)
        return self

    @property
    def short_name(self) -> str:
        """The stem of the first file, or the last part of the data set's path; letters, digits, dots and dashes."""
        files = [self.data_files] if isinstance(self.data_files, str) else self.data_files
        name = PurePath(files[0]).stem if files else PurePath(self.path).name
        return re.sub(r"[^\w.-]+", "_", name).strip("_") or "set"


class EvalFraction(Section):
    """Held-out share of the training rows."""

    fraction: float = Field(gt=0, lt=1, description="Share of the training rows held out.")


class Data(Section):
    """What is learned from."""

    train: list[DataSet] = Field(min_length=1, description="Data sets, mixed by weight.")
    eval: EvalFraction | list[DataSet] | None = Field(None, description="{fraction: 0.05}, data sets, or null.")
    max_length: Annotated[int, Field(ge=8)] = Field(2048, description="Tokens of one row, packed or not.")
    packing: bool = Field(True, description="Fill rows with whole documents; they do not see each other.")
    train_on: TrainOn = Field("assistant", description="assistant: its turns; completion: the last answer; all.")
    truncation: Truncation = Field("error", description="What happens to a document longer than max_length.")
    chat_template: Local | None = Field(None, description="Jinja text or a file; null: the tokenizer's own.")
    date_string: str = Field("26 Jul 2024", description="The day that templates print as today's.")

    @property
    def eval_sets(self) -> list[DataSet]:
        """The data sets of held-out rows; none where `eval` is null or a share of the training rows."""
        return self.eval if isinstance(self.eval, list) else []

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """What the template is given when the model is prompted: what all training sets say, nothing if they differ."""
        first = self.train[0].chat_template_kwargs
        return first if all(entry.chat_template_kwargs == first for entry in self.train) else {}

    @property
    def eval_names(self) -> list[str]:
        """The name of each of `eval_sets` in metrics: its file's or its own, with its place where names are equal."""
        names = [entry.short_name for entry in self.eval_sets]
        distinct = len(set(names)) == len(names)
        return names if distinct else [f"{name}_{place}" for place, name in enumerate(names, 1)]

    @property
    def metrics(self) -> list[str]:
        """What metric_for_best_model may name: the loss of all held-out rows, and of each of several data sets."""
        names = self.eval_names if len(self.eval_sets) > 1 else []
        return ["eval_loss", *(f"eval_{name}_loss" for name in names)]

    @property
    def sets(self) -> list[DataSet]:
        """All data sets, those of training first."""
        return [*self.train, *self.eval_sets]


class Training(Section):
    """The training itself: the same for every strategy and number of GPUs."""

    global_batch_size: Count = Field(16, description="Rows per optimizer step over all ranks; accumulation is derived.")
    per_device_batch_size: Count = Field(1, description="Rows of one forward on one rank.")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the rows; max_steps wins.")
    max_steps: Count | None = Field(None, description="Optimizer steps; null: from num_train_epochs.")
    learning_rate: float = Field(2e-4, gt=0, description="Peak of the schedule.")
    lr_scheduler_type: Scheduler = Field("cosine", description="Shape of the schedule, by transformers' names.")
    lr_scheduler_kwargs: dict[str, Any] = Field({}, description="The shape's own arguments, by transformers' names.")
    warmup_ratio: Fraction = Field(0.03, description="Share of the steps spent warming up.")
    warmup_steps: WholeNumber | None = Field(None, description="Steps of warming up; wins over warmup_ratio.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled decay; not on biases and norms.")
    adam_beta1: Decay = Field(0.9, description="AdamW's decay of the gradient's running mean.")
    adam_beta2: Decay = Field(0.999, description="AdamW's decay of the squared gradient's running mean.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Added to the root of that mean before AdamW divides by it.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient's global norm to this; null: never.")
    optim: Optimizer = Field("adamw", description="AdamW: fused; bitsandbytes', not sharded; paged: on CUDA.")
    mixed_precision: Literal["bf16", "fp16", "no"] = Field("bf16", description="For computation; fp16 scales losses.")
    pure_bf16: bool = Field(False, description="Trained weights and optimizer state in bfloat16 too.")
    activation_checkpointing: bool | Count = Field(
        True, description="Recompute layers in backward: true, false, or n for every n-th layer."
    )
    non_blocking: bool = Field(True, description="Pinned memory and copies one batch ahead.")
    seed: WholeNumber = Field(42, description="Seed of row order, adapter initialisation and dropout.")
    resume: Literal["auto", "never"] = Field("auto", description="auto: continue the run folder's newest checkpoint.")
    early_stopping_patience: Count | None = Field(None, description="Evaluations without a better loss before the end.")
    load_best_model_at_end: bool | None = Field(
        None, description="Export the best evaluation's weights, not the last; null: with early_stopping_patience."
    )
    metric_for_best_model: str = Field(
        "eval_loss", description="eval_loss: of all held-out rows; eval_NAME_loss: of the data.eval set NAME."
    )

    @property
    def exports_best(self) -> bool:
        """Whether the weights of the best evaluation are exported; else those of the last step."""
        if self.load_best_model_at_end is None:
            return self.early_stopping_patience is not None
        return self.load_best_model_at_end

    @model_validator(mode="after")
    def known_schedule(self) -> Training:
        cross_checks.check_schedule(self)
        return self

    def warmup_of(self, total_steps: int) -> int:
        """Optimizer steps of the warmup: `warmup_steps`, or `warmup_ratio` of the run rounded up."""
        return math.ceil(self.warmup_ratio * total_steps) if self.warmup_steps is None else self.warmup_steps


class Samples(Section):
    """Answers before and after training, to be looked at."""

    count: WholeNumber = Field(4, description="Held-out prompts answered when prompts is null; 0: none.")
    prompts: list[str] | None = Field(None, description="User messages to answer; null: the first held-out rows'.")
    max_new_tokens: Count = Field(64, description="Length of an answer in tokens.")


class Hub(Section):
    """Where the result goes."""

    repo_id: str | None = Field(None, description="owner/name on the Hub; the repository is made if missing.")
    push: bool = Field(False, description="Push the result when training is finished; needs repo_id.")
    private: bool = Field(True, description="Only you see it; false is needed to push to a public repository too.")
    revision: str = Field("main", min_length=1, description="Branch to push to; made if missing.")
    checkpoints: str | None = Field(None, min_length=1, description="Branch for the newest checkpoint; null: none.")


class Recipe(Section):
    """One fine-tuning run."""

    budget: Budget = Field(default_factory=Budget, description="What the recipe is made for.")
    accelerate_config: Local = Field("single", min_length=1, description="A file of accelerate_configs/, or a path.")
    model: ModelSection = Field(description="The base model.")
    quantization: Quantization | None = Field(None, description="Quantised base weights; null: none.")
    lora: Lora | None = Field(default_factory=Lora, description="Adapters; null: all weights are trained.")
    data: Data = Field(description="What is learned from.")
    training: Training = Field(default_factory=Training, description="The training itself.")
    samples: Samples = Field(default_factory=Samples, description="Answers before and after training.")
    logging_steps: Count = Field(1, description="Optimizer steps between two lines of metrics.")
    eval_steps: Interval = Field(0.1, description="Steps between two evaluations, or below 1 their share of the run.")
    save_steps: Interval = Field(0.1, description="Steps between two checkpoints, or below 1 their share of the run.")
    save_total_limit: Count = Field(2, description="Newest checkpoints kept, besides the best evaluation's.")
    timeout_seconds: int = Field(
        600, ge=5, description="Seconds without a sign of life after which a rank counts as frozen and the run ends."
    )
    measure_phases: bool = Field(False, description="Memory, seconds, collectives of each phase; slows.")
    report_to: list[Tracker] = Field([], description="Trackers besides metrics.jsonl; wandb without a key: offline.")
    hub: Hub = Field(default_factory=Hub, description="Where the result goes.")
    output_dir: Local | None = Field(None, min_length=1, description="Run folder; null: runs/ and the recipe's name.")

    @model_validator(mode="after")
    def sections_agree(self) -> Recipe:
        cross_checks.check_sections(self)
        return self

    @property
    def run_dir(self) -> str:
        """The run folder; filled in by the loader when the recipe names none."""
        assert self.output_dir is not None, "load_recipe fills output_dir"
        return self.output_dir
