"""`finetune launch`: fills the platform's file in `jobs/`, to be read, submitted or run. No torch here.

launcher.py, slurm.py and rendezvous.py read the same options again in every rank.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from pprint import pformat
from typing import Any

import yaml

from finetune.errors import FinetuneError
from finetune.files import write_text
from finetune.launch.hf_jobs import flavour_of
from finetune.launch.plan import LaunchPlan
from finetune.output_stream import printable
from finetune.paths import read_regular
from finetune.recipe.storage_address import OBJECT_STORES
from finetune.recipe.yaml_text import MAX_BYTES
from finetune.wording import counted

_PORT = 29500  # torch's own default
_MARK = "# Made by: finetune "
_LONGEST_NAME = 40  # of 63 letters of a pod's name: JobSet adds -node-0-0-abcde


def script(plan: LaunchPlan, timeout: str = "") -> str:
    """The file's text: a bash script to run on every machine, or an engine's job.

    Args:
        timeout: Of a job on hf-jobs, as `hf jobs run --timeout` takes it.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "jobs"), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= dict[str, Callable[..., str]](
        contents=lambda path: read_regular(path, MAX_BYTES).decode(),
        printable=printable,
        python=lambda value: pformat(value, width=110, sort_dicts=False),
        quote=shlex.quote,
        repr=repr,
        words=shlex.join,
        yaml=_as_yaml,
    )
    recipe, stem = plan.loaded.recipe, plan.loaded.path.stem
    kubernetes_name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if not kubernetes_name[:1].isalpha():
        kubernetes_name = f"run-{kubernetes_name}"
    # The two comments that each file begins with.
    devices = counted(plan.gpus, "GPU") if plan.gpus else "its CPU"
    machines = f"one machine with {devices}"
    if plan.nodes > 1:
        machines = f"{plan.nodes} machines with {devices} each"
    line = f"# {plan.strategy.name} on {machines}, {counted(plan.world, 'rank')}."
    if plan.launcher in ("slurm", "torchrun", "ray"):
        line += " Paths are as seen from the folder where it is started."
    return environment.get_template(f"{plan.launcher}.jinja").render(
        plan=plan,
        recipe=recipe,
        options=plan.options,
        head=f"{_MARK}launch {printable(plan.verb_arguments)}\n{line}",
        timeout=timeout,
        port=_PORT,
        slurm_name=re.sub(r"[^\w.-]", "-", stem),
        kubernetes_name=kubernetes_name[:_LONGEST_NAME].strip("-"),
        storage_package=OBJECT_STORES.get((recipe.storage or "").partition("://")[0]),
        flavour_of=flavour_of,
        ray_folder=str(Path(recipe.run_dir).parent / "ray"),  # Ray's own notes
    )


def write_script(path: Path, text: str) -> None:
    """Write the file. An existing file is replaced only if this program made it.

    Raises FinetuneError, EnvironmentMismatch.
    """
    if path.exists() and not (path.is_file() and _MARK.encode() in path.read_bytes()[:1000]):
        raise FinetuneError(f"-o: {path}: exists and was not made by finetune; name another file")
    write_text(path, text)


def line_of_machine(plan: LaunchPlan) -> str:
    """The line that starts machine R of several by hand. ADDRESS_OF_0 is machine 0's address."""
    place = f"--node-rank R --master-addr ADDRESS_OF_0 --master-port {_PORT}"
    return f"torchrun --nnodes {plan.nodes} {place} --nproc-per-node {plan.ranks} {shlex.join(plan.words)}"


def _as_yaml(value: Any, depth: int = 0) -> str:
    """A word for the end of a line. With `depth` the lines of a mapping or a list, as inside so many mappings."""
    for _ in range(depth):
        value = {"outer": value}
    text = yaml.dump(value, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=2**20)
    return text.split("\n", depth)[depth].removesuffix("\n").removesuffix("\n...")


class _Writer(yaml.SafeDumper):
    """Writes a text of several lines as such."""


_Writer.add_representer(
    str,
    lambda writer, text: writer.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
