"""The base's files decide the structure: whether head and embeddings are one matrix, and which tensors exist.

A config.json may tie head and embeddings although the files hold two different matrices. transformers then leaves them
untied, but only if it has the values. A rank without weights has none, and under ZeRO-3 transformers compares two empty
vectors. So the files are read once, before any model is built, and the configuration is corrected to match them.

transformers' own loading onto meta compares the names, so its renamings, conversions and exceptions apply. At most two
matrices are read, and only if both exist and the configuration ties them.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.base.location import base_file, folder_of, resolve_model_path
from finetune.errors import FinetuneError
from finetune.library_errors import library_errors, not_loaded
from finetune.output_stream import one_line, silenced
from finetune.recipe.schema import ModelSection, Recipe
from finetune.untrusted.json_files import read_object
from finetune.untrusted.model_folder import INDEX, MOST_INDEX, SINGLE, plain_names, weight_files
from finetune.untrusted.safetensors_header import TensorFacts, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ROWS_READ = 4096  # at a time, from each of two matrices that are compared: 32 MB in bfloat16 at a width of 4,096


@dataclass(frozen=True)
class StoredStructure:
    """The structure in one folder's files, beside its config.json."""

    digest: str  # SHA-256 of names, number formats and shapes, and of `tied`
    tied: bool | None  # head and embeddings are one matrix; None: the architecture never ties, or lacks one of them
    config_tied: bool  # the value in config.json, else the architecture's default
    problem: str  # missing, unexpected or mis-shaped tensors, by transformers' names; empty if the files fit
    unread: Mapping[str, str] = field(default_factory=dict)  # tensors that transformers passes over -> their file
    # Stored tensors that are no parameters: the model's name -> their file, and name there.
    buffers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    quantised: bool = False

    @property
    def is_at_odds(self) -> bool:
        """Whether config.json ties head and embeddings, and the files hold two different matrices."""
        return self.config_tied and self.tied is False


# Keys of a configuration that say nothing of the model's structure.
NOT_OF_STRUCTURE = ("quantization_config", "dtype", "torch_dtype", "_name_or_path", "transformers_version")

# (model.name_or_path, model.revision) -> the ties that rank 0 found, for ranks that may not see the files.
_AGREED: dict[tuple[str, str], bool | None] = {}


def agree(section: ModelSection, tied: bool | None) -> None:
    """Use another rank's finding about this base's ties, for the rest of this process."""
    _AGREED[section.name_or_path, section.revision] = tied


def stored_structure(section: ModelSection, path: str | None = None) -> StoredStructure | None:
    """The structure in the base's files, or in the folder `path`. None if the files are not on this machine.

    Takes about a second for 8B parameters, once in a process. Raises FinetuneError for an incomplete file.
    """
    folder = folder_of(path or section.name_or_path, section.revision)
    files = [] if folder is None else weight_files(folder)
    if folder is None or not all(file.is_file() for file in files):
        return None
    facts = [(file.resolve(), file.stat()) for file in (folder / "config.json", *files)]
    key = tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in facts)
    with library_errors(partial(not_loaded, "weights", path or section.name_or_path)):
        return _decided(str(folder), tuple(map(str, files)), key, section.trust_remote_code)


def fetch_weights(section: ModelSection) -> None:
    """Download the base's weights from the Hub if they are not on this machine.

    A file that the Hub lacks, or a Hub that does not answer, is no error here: the load reports it.
    """
    if Path(resolve_model_path(section.name_or_path)).is_dir():
        return
    with suppress(FinetuneError):
        if base_file(section, SINGLE) is None and (index := base_file(section, INDEX)) is not None:
            names = plain_names(index, read_object(index, MOST_INDEX, unique=True).get("weight_map")).values()
            for name in sorted({*names}):
                base_file(section, name)


def as_stored(config: PreTrainedConfig, section: ModelSection, path: str | None = None) -> PreTrainedConfig:
    """The configuration, changed in place to tie head and embeddings exactly if the base's files do."""
    if path is None and (section.name_or_path, section.revision) in _AGREED:
        tied = _AGREED[section.name_or_path, section.revision]
    else:
        structure = stored_structure(section, path)
        tied = None if structure is None else structure.tied
    if tied is not None:
        for settings in (config, config.get_text_config()):
            if bool(getattr(settings, "tie_word_embeddings", False)) != tied:
                settings.tie_word_embeddings = tied
    return config


def unties(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder's files hold two matrices that its config.json ties.

    torch is imported only if several tensors have one row per token, which few models have.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    if config.get("tie_word_embeddings") is False and text.get("tie_word_embeddings") is False:
        return False
    try:
        headers = [read_header(file) for file in weight_files(folder) if file.is_file()]
        shapes = [facts.shape for header in headers for facts in header.values()]
        if sum(len(shape) == 2 and shape[0] == text.get("vocab_size", shape[0]) for shape in shapes) < 2:
            return False
        structure = stored_structure(ModelSection(name_or_path=str(folder)))
    except FinetuneError:  # damaged files, or code that is not trusted: the load reports them
        return False
    return structure is not None and structure.is_at_odds


def refuse_files(recipe: Recipe, found: StoredStructure | None) -> None:
    """Raise FinetuneError if tensors are missing, unexpected or mis-shaped, or if an adapter with new tokens would not
    load onto them.

    peft 0.21 follows config.json when it loads trained rows: a separate head would get the embeddings' rows.
    """
    name = one_line(recipe.model.name_or_path)
    if found is not None and found.problem:
        raise FinetuneError(f"model.name_or_path: {name}: {found.problem}")
    if found is not None and found.is_at_odds and recipe.lora and recipe.model.new_tokens:
        raise FinetuneError(
            f"model.add_tokens: {name} holds two matrices for head and embeddings, and its config.json ties them; peft "
            "would load the new rows wrongly. Write tie_word_embeddings: false into its config.json"
        )


@contextmanager
def _without_engine() -> Iterator[None]:
    """Inside this context transformers builds and loads as if there were no ZeRO-3.

    Uses a private name, transformers' handle on the engine's config: only an Accelerate plugin can set it publicly.
    """
    from transformers.integrations import deepspeed

    handle = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = handle


@lru_cache(maxsize=8)
@_without_engine()
def _decided(folder: str, files: tuple[str, ...], key: tuple[Any, ...], trusted: bool) -> StoredStructure:
    import torch
    from transformers import AutoConfig

    from finetune.model.text_part import WholeNames, auto_class

    tensors: dict[str, tuple[str, TensorFacts]] = {}
    for file in files:
        tensors |= {name: (file, facts) for name, facts in read_header(Path(file)).items()}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    quantised = bool(getattr(config, "quantization_config", None))
    if quantised:  # only the library that packed the tensors knows them; embeddings and head are plain
        del config.quantization_config
    with torch.device("meta"), silenced():
        structure: Any = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trusted)
    ties = dict(getattr(structure, "all_tied_weights_keys", None) or {})
    untied = copy.deepcopy(config)
    for settings in (untied, untied.get_text_config()):
        settings.tie_word_embeddings = False
    info = _loaded_onto_meta(type(structure), untied, {name: facts for name, (_, facts) in tensors.items()})
    missing = set(info["missing_keys"])
    unread = {name: file for name, (file, _) in tensors.items() if name not in info["taken"]}
    if quantised:  # scales and packed numbers are beside the layer's other tensors
        modules = {name.rpartition(".")[0] for name in info["taken"]}
        unread = {name: file for name, file in unread.items() if name.rpartition(".")[0] not in modules}
    numbers = structure.state_dict().keys() - dict(structure.named_parameters(remove_duplicate=False)).keys()
    names = WholeNames({}, structure)
    stored = {name: names.in_file(name, tensors) for name in sorted(numbers)}
    buffers = {name: (tensors[saved][0], saved) for name, saved in stored.items() if saved in info["taken"]}
    tied = True if ties else None
    for target, source in ties.items():
        present = {target, source} - missing
        if len(present) == 1:  # transformers uses the one for both
            missing -= {target, source}
        elif len(present) == 2 and not _are_equal(structure, untied, tensors, (target, source)):
            tied = False
    problem = "" if quantised else _problem(structure, missing, info, ties=bool(ties))
    content = [f"{name} {facts.dtype} {facts.shape}" for name, (_, facts) in sorted(tensors.items())]
    digest = hashlib.sha256("\n".join([*content, str(tied)]).encode()).hexdigest()
    return StoredStructure(digest, tied, bool(ties), problem, unread, buffers, quantised)


def passed_over(kind: type[PreTrainedModel], config: PreTrainedConfig, names: Iterable[str]) -> set[str]:
    """The names of tensors that this class ignores without a word when it is loaded."""
    expected = dict.fromkeys(names, TensorFacts("F32", (1,)))
    with _without_engine():
        unexpected = set(_loaded_onto_meta(kind, config, expected)["unexpected_keys"])
    if unexpected - expected.keys():  # under other names, so which ones is not known
        return set()
    return expected.keys() - unexpected


def _loaded_onto_meta(
    kind: type[PreTrainedModel], config: PreTrainedConfig, tensors: Mapping[str, TensorFacts]
) -> dict[str, Any]:
    """transformers' report of a load from tensors with these names and shapes, and `taken`: the names that it read."""
    import torch
    from transformers.utils import logging as transformers_logging

    taken: set[str] = set()

    class Watched(torch.Tensor):
        """A tensor that notes its name when it is read: transformers takes `tensor[...]` from what it loads alone."""

        called: str

        def __getitem__(self, index: Any) -> torch.Tensor:
            taken.add(self.called)
            return self.as_subclass(torch.Tensor)[index]

    watched: dict[str, Watched] = {}
    for name, facts in tensors.items():
        watched[name] = torch.empty(facts.shape, device="meta").as_subclass(Watched)
        watched[name].called = name

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)  # the report comes back as a value
    from_pretrained: Any = kind.from_pretrained  # its annotation lacks output_loading_info
    try:
        with silenced():
            _, info = from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=watched,
                dtype=torch.float32,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    return {**info, "taken": taken}


def _are_equal(
    structure: PreTrainedModel,
    untied: PreTrainedConfig,
    tensors: Mapping[str, tuple[str, TensorFacts]],
    parameters: tuple[str, str],
) -> bool:
    """Whether two parameters have equal values in the files, by torch.equal."""
    import torch
    from safetensors import safe_open

    shape = tuple(structure.get_parameter(parameters[0]).shape)
    places: dict[str, str] = {}
    for name, (_, facts) in tensors.items():
        if facts.shape == shape:  # a load of this tensor alone shows which parameter it becomes
            missing = _loaded_onto_meta(type(structure), untied, {name: facts})["missing_keys"]
            places |= {parameter: name for parameter in parameters if parameter not in missing}
    if len(places) < 2:  # one of them is made of several tensors, which a tied one never is
        return False
    first, second = (places[parameter] for parameter in parameters)
    with safe_open(tensors[first][0], framework="pt") as one, safe_open(tensors[second][0], framework="pt") as other:
        for row in range(0, shape[0], ROWS_READ):
            rows = one.get_slice(first)[row : row + ROWS_READ], other.get_slice(second)[row : row + ROWS_READ]
            dtype = torch.promote_types(rows[0].dtype, rows[1].dtype)
            if not torch.equal(rows[0].to(dtype), rows[1].to(dtype)):
                return False
    return True


def _problem(structure: PreTrainedModel, missing: set[str], info: Mapping[str, Any], *, ties: bool) -> str:
    """One line about the first kind of tensor that does not fit; empty if all fit."""
    ends = structure.get_input_embeddings(), structure.get_output_embeddings()
    tables = {id(end.weight) for end in ends if end is not None}
    parameters = dict(structure.named_parameters(remove_duplicate=False))
    lost = sorted(name for name in missing if id(parameters.get(name)) in tables)
    if lost == sorted(missing) and len(lost) == 1 and not ties:
        return (
            f"the files have no {lost[0]}, and config.json does not tie head and embeddings; if the model has one "
            "matrix for both, write tie_word_embeddings: true into its config.json, else fetch the model again"
        )
    mismatched = [
        f"{name} ({'x'.join(map(str, stored))} in the files, {'x'.join(map(str, built))} by config.json)"
        for name, stored, built in info["mismatched_keys"]
    ]
    for kind, names in (
        ("missing keys", missing),
        ("unexpected keys", info["unexpected_keys"]),
        ("mismatched keys", mismatched),
    ):
        if names:
            first = one_line(min(names), 160)
            return f"{len(names)} {kind}, first {first}; these weights are not those of this architecture"
    return ""
