"""`finetune doctor`: is this machine fit for a run? Its output may be pasted into a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from finetune import DISTRIBUTION, __version__
from finetune.base.location import weights_are_here
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import cache_folder
from finetune.hub.client import check_permission, classify_error
from finetune.measure.host_memory import usable_cores
from finetune.model.known_configs import GATED
from finetune.paths import PACKAGE, TRAIN_SCRIPT
from finetune.recipe.optimizers import checkpoint_bytes
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_text import yaml_value
from finetune.redaction import redact, variables
from finetune.wording import GIB, counted, install_command

FindingState = Literal["ok", "look", "bad"]
# Package -> what is imported, what it is for, and the extra that installs it.
EXTRAS = {
    "bitsandbytes": ("bitsandbytes", "quantised bases and 8-bit optimizers", "qlora"),
    "deepspeed": ("deepspeed", "ZeRO", "deepspeed"),
    "gguf": ("gguf", "the quickstart's model", "quickstart"),
    "openpyxl": ("openpyxl", "workbooks as data", "excel"),
    "lm-eval": ("lm_eval", "benchmarks by `finetune eval --tasks`", "eval"),
}
_MATTER = (
    r"CUDA_\w+|NCCL_\w+|GLOO_\w+|OMP_NUM_THREADS|MKL_NUM_THREADS|ACCELERATE_\w+|PET_\w+|TORCH_\w+|PYTORCH_\w+|DS_\w+"
    r"|HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT|HUB_ENABLE_HF_TRANSFER|HUB_DISABLE_XET)|TRANSFORMERS_OFFLINE"
    r"|FINETUNE_CACHE|FINETUNE_GGUF_PYTHON|SLURM_JOB_NUM_NODES|SLURM_NTASKS"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH"
)
_TRY_IMPORTS = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(failed))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check, and a remedy if it is not well."""

    name: str
    state: FindingState
    seen: str
    remedy: str = ""


def examine_machine(loaded: LoadedRecipe | None = None, *, online: bool = False) -> Iterator[Finding]:
    """All findings in turn, without private data; `online` asks the Hub about the token's rights, and about the model.

    With a recipe also what `finetune train` would refuse on this machine.
    """
    recipe = loaded.recipe if loaded else None
    machine = chain(check_python(), check_libraries(), check_extras(), check_has_gpus())
    places = chain(check_disk(recipe), check_token(recipe, online=online), check_accelerate(), check_variables())
    for finding in chain(machine, places, check_start(loaded) if loaded else ()):
        yield Finding(finding.name, finding.state, redact(finding.seen), redact(finding.remedy))


def check_python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}, finetune {__version__}")


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_libraries() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        lines = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    except (OSError, KeyError, ValueError):  # an installed package
        lines = [line for line in importlib.metadata.requires(DISTRIBUTION) or () if "extra ==" not in line]
    libraries = [Requirement(line) for line in lines]
    versions = {library.name: installed_version(library.name) for library in libraries}
    yield Finding("libraries", "ok", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    for library in libraries:
        version = versions[library.name]
        if version is None or not library.specifier.contains(version, True):
            text = f"{library.name}: {version or 'not installed'}, required is {library}"
            yield Finding("libraries", "bad", text, f"pip install '{library}'")


def check_extras() -> Iterator[Finding]:
    """Each extra that is installed must load: a wheel for another CUDA or another torch fails here, not in a run."""
    versions = {name: version for name in EXTRAS if (version := installed_version(name))}
    modules = [EXTRAS[name][0] for name in versions]
    process = subprocess.run(
        [sys.executable, "-c", _TRY_IMPORTS, *modules], capture_output=True, text=True, timeout=300, check=False
    )
    try:
        failed: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        failed = dict.fromkeys(modules, f"the process ended with {process.returncode}")
    listed = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    yield Finding("extras", "ok", listed)
    for name, (module, purpose, extra) in EXTRAS.items():
        if name not in versions:
            yield Finding("extras", "look", f"no {name}", f"for {purpose}, in the checkout: {install_command(extra)}")
        elif module in failed:
            yield Finding("extras", "bad", f"{name}: {failed[module][:200]}", "install a wheel that fits this torch")


def check_start(loaded: LoadedRecipe) -> Iterator[Finding]:
    """Each refusal of `finetune train` before it reads data, by the trainer's own checks; then the model's weights."""
    from finetune.launch.launcher import read_launch
    from finetune.launch.local_ranks import ranks_here
    from finetune.launch.plan import plan_launch
    from finetune.recipe.strategy import strategy_of
    from finetune.recipe.strategy_fit import refuse_recipe
    from finetune.strategies.machine import device_of, fastest_on, machine_problems

    recipe = loaded.recipe
    try:
        ranks_here(plan_launch(loaded.path, [], launcher="torchrun"))
    except FinetuneError as error:
        yield Finding("ranks", "bad", *error.parts())
    words = ("python", str(TRAIN_SCRIPT), str(loaded.path))
    launch = replace(read_launch(), words=words, on_cpu=not recipe.budget.gpus)
    if (device := device_of(launch)).type == "cuda":  # number formats that the recipe leaves to its device
        recipe = loaded.formats_for(fastest_on(device))[0].recipe
    problems = list[tuple[str, str]]()
    try:
        refuse_recipe(recipe)
    except EnvironmentMismatch as error:
        problems.append(("strategy", str(error)))
    for topic, problem in [*problems, *machine_problems(recipe, strategy_of(recipe), launch)]:
        yield Finding(topic, "bad", *FinetuneError(problem).parts())
    model = recipe.model
    if weights_are_here(model.name_or_path, model.revision):
        yield Finding("model", "ok", f"the weights of {model.name_or_path} are on this machine")
        return
    offline = " and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    state: FindingState = "bad" if offline else "look"
    yield Finding(
        "model", state, f"the weights of {model.name_or_path} are not on this machine{offline}",
        f"hf download {model.name_or_path}",
    )  # fmt: skip


def check_has_gpus() -> Iterator[Finding]:
    import psutil
    import torch

    from finetune.strategies.machine import OLDER_WHEELS, kernels_of_others, why_torch_sees_no_gpu

    memory = psutil.virtual_memory()
    cores = usable_cores()
    room = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of memory free"
    yield Finding("devices", "ok", f"{cores} CPU cores, {room}")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"GPU {index}: {device.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, bf16 "
        text += "yes" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
        if kernels := kernels_of_others(index):
            yield Finding("devices", "bad", f"{text}; torch has kernels for {kernels}", OLDER_WHEELS)
        elif free < total / 2:
            yield Finding("devices", "look", text, "another program holds its memory; nvidia-smi names it")
        else:
            yield Finding("devices", "ok", text)
    if not torch.cuda.is_available() and (reason := why_torch_sees_no_gpu()):
        yield Finding("wheels", "bad", *FinetuneError(reason).parts())
    else:
        built = torch.version.cuda or torch.version.hip or "the CPU"
        yield Finding("wheels", "ok", f"torch {torch.__version__}, built for {built}")


def check_disk(recipe: Recipe | None) -> Iterator[Finding]:
    places = folders(recipe)
    free = {name: free_bytes(folder) for name, folder in places.items()}
    yield Finding("disk", "ok", ", ".join(f"{name} {size / GIB:.1f} GiB free" for name, size in free.items()))
    for name, folder in places.items():
        if not may_write(folder):
            yield Finding("disk", "bad", f"the {name} cannot be written", f"give rights to {folder}, or name another")
    if recipe is None:
        return
    try:
        need = need_of(recipe)
    except FinetuneError as error:
        yield Finding("disk", "look", "what the recipe needs is not known", str(error))
        return
    for name, size in (("run folder", need.in_run_folder), ("model cache", need.download)):
        text = f"{name}: the recipe needs {size / GIB:.1f} GiB"
        if name == "run folder":
            text += f", {counted(need.keep + 1, 'checkpoint')} of {need.checkpoint / GIB:.1f}"
        if size > free[name]:
            remedy = "free some space, lower save_total_limit, or name another folder"
            yield Finding("disk", "bad", text, remedy)
        else:
            yield Finding("disk", "ok", text)


def check_token(recipe: Recipe | None, *, online: bool) -> Iterator[Finding]:
    """Whether there is a token, and with `online` its rights; the token itself is never shown."""
    from huggingface_hub import get_token

    login = "hf auth login"
    if get_token() is None:
        model = recipe.model if recipe else None
        if model is None or weights_are_here(model.name_or_path, model.revision):
            yield Finding("token", "ok", f"none; gated models and `finetune push` need one: {login}")
        else:
            yield _token_for(model.name_or_path, online=online)
        if recipe and (recipe.hub.push or (recipe.storage or "").startswith("hf://")):
            yield Finding("token", "bad", "none, and the recipe writes to the Hub", login)
        return
    named = next((name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)), None)
    text = f"found, from {named or 'the stored login'}"
    if not online:
        yield Finding("token", "ok", f"{text}; --online asks the Hub what it may do")
        return
    try:
        yield Finding("token", "ok", f"{text}: {scope(recipe.hub.repo_id if recipe else None)}")
    except FinetuneError as error:
        reason, remedy = error.parts()
        yield Finding("token", "bad", f"{text}: {reason}", remedy)


def check_accelerate() -> Iterator[Finding]:
    """A default config in the cache silently decides what a bare `accelerate launch` does."""
    import yaml
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    if not path.is_file():
        yield Finding("accelerate", "ok", "no default config in the cache")
        return
    try:
        config = yaml_value(path.read_text("utf-8"))
        processes = counted(int(config.get("num_processes", 1)), "process", "processes")
        kind = f"{config.get('distributed_type', 'NO')}, {processes}"
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError):
        kind = "it cannot be read"
    remedy = f"a bare `accelerate launch` follows it; move {path} away, or pass --config_file"
    yield Finding("accelerate", "look", f"a default config is in the cache: {kind}", remedy)


def check_variables() -> Iterator[Finding]:
    values = variables(_MATTER)
    yield Finding(
        "variables", "ok", ", ".join(f"{name}={value}" for name, value in values.items()) or "none that matter"
    )


def as_text(item: Finding) -> str:
    """One line; a remedy on the next."""
    line = f"{item.state:<5}{item.name:<11}{item.seen}"
    if item.remedy:
        return f"{line}\n{'':<16}{item.remedy}"
    return line


def _token_for(name: str, *, online: bool) -> Finding:
    """Whether this model can be downloaded without a token. With `online` the Hub is asked, without one."""
    from huggingface_hub import HfApi

    gated = name.startswith(GATED)
    if not online and not gated:
        return Finding("token", "look", f"none; {name} may be gated", "--online asks the Hub")
    if online:
        try:
            gated = bool(HfApi().model_info(name, token=False).gated)
        except Exception as error:
            if (hub_error := classify_error(error)) is None:
                raise
            remedy = "try again later, or correct the name"
            return Finding("token", "bad", f"none; {name}: {hub_error.reason}", remedy)
    if gated:
        remedy = f"ask on https://huggingface.co/{name}, then: hf auth login"
        return Finding("token", "bad", f"none, and {name} is gated", remedy)
    return Finding("token", "ok", f"none; {name} needs none")


def scope(repo_id: str | None, endpoint: str | None = None) -> str:
    """`read`, `write` or `fine-grained`, and whether it may write to `repo_id`, the recipe's hub.repo_id.

    Raises EnvironmentMismatch where the Hub refuses it or does not answer.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    try:
        token = api.whoami().get("auth", {}).get("accessToken", {})
        if repo_id:
            check_permission(api, repo_id)
    except EnvironmentMismatch:  # which names the user, and whom else it may write for
        text = "it may not write to the recipe's hub.repo_id; create one with write access there, then: hf auth login"
        raise EnvironmentMismatch(text) from None
    except Exception as error:
        hub_error = classify_error(error)
        if hub_error is None:
            raise
        later = "try again later" if hub_error.transient else "create another one, then: hf auth login"
        raise EnvironmentMismatch(f"{hub_error.reason}; {later}") from error
    role = token.get("role") or "of a kind it does not name"
    if role == "fineGrained":
        role = "fine-grained"
    if repo_id:
        return f"{role}, may write to hub.repo_id"
    return str(role)


# ---- the disk that a run takes; no weights are read or downloaded


_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Need:
    """Bytes that a run writes."""

    checkpoint: int  # one of them
    keep: int  # checkpoints, the best evaluation's included
    export: int
    download: int  # of base weights that are not on this machine yet

    @property
    def in_run_folder(self) -> int:
        """All checkpoints, one more while it is written, and the result."""
        return (self.keep + 1) * self.checkpoint + self.export


def need_of(recipe: Recipe) -> Need:
    """The bytes that the run will write. Raises EnvironmentMismatch if the model's configuration is not here."""
    total, trained = count_weights(recipe)
    training, frozen = recipe.training, _WIDTH[recipe.model.dtype]
    width = 2 if training.pure_bf16 else 4
    on_disk = weights_are_here(recipe.model.name_or_path, recipe.model.revision)
    return Need(
        checkpoint=checkpoint_bytes(training, trained),
        keep=recipe.save_total_limit + training.exports_best,
        export=trained * width if recipe.lora else total * frozen,
        download=0 if on_disk else total * 2,  # published in 16 bits
    )


def count_weights(recipe: Recipe) -> tuple[int, int]:
    """The numbers of all weights and of trained weights, counted on the model's structure without any data."""
    import torch

    from finetune.model.build import build_model
    from finetune.model.known_configs import full_config

    config, _ = full_config(recipe.model.name_or_path, recipe.model.revision)
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        changed: dict[str, object] = {
            "model": recipe.model.model_copy(update={"name_or_path": folder, "revision": "main"}),
            "quantization": None,
        }
        if recipe.lora:
            changed["lora"] = recipe.lora.model_copy(update={"init_lora_weights": True})
        model = build_model(recipe.model_copy(update=changed), torch.device("meta"))
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)


def folders(recipe: Recipe | None) -> dict[str, Path]:
    """The folders that a run writes to, by purpose."""
    from huggingface_hub import constants

    run = Path(recipe.run_dir) if recipe else Path.cwd()
    return {"run folder": run, "model cache": Path(constants.HF_HUB_CACHE), "token cache": cache_folder()}


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder that may not exist yet."""
    return shutil.disk_usage(_first_existing(folder)).free


def may_write(folder: Path) -> bool:
    """Whether the folder, or the first existing one above it, can be written."""
    return os.access(_first_existing(folder), os.W_OK)


def _first_existing(folder: Path) -> Path:
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
