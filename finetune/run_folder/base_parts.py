"""Parts of an export that come unchanged from its base's files: spelling of settings, code, and untrained tensors.

transformers 5 reads the settings of every earlier release, and writes its own spelling: `rope_parameters` in place of
`rope_theta` and `rope_scaling`, `dtype`, the class `TokenizersBackend`. Earlier releases and servers read another
rotary base from that, or nothing. So an export has the base's settings, changed where training changed the model.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_relative_import_files

from finetune.base.location import folder_of, resolve_model_path
from finetune.files import TEMPORARY_PREFIX, write_json, write_text
from finetune.generation.settings import without_penalties
from finetune.model.dtypes import dtype_name
from finetune.model.stored_structure import passed_over, stored_structure
from finetune.model.text_part import names_in_whole
from finetune.output_stream import silenced
from finetune.recipe.schema import ModelSection
from finetune.run_folder.facts import GENERATION
from finetune.untrusted.config_sizes import read_config
from finetune.untrusted.json_files import read_object
from finetune.untrusted.model_folder import INDEX
from finetune.untrusted.programs import MOST_TOKENIZER
from finetune.untrusted.safetensors_header import BITS, read_header
from finetune.wording import counted

TOKENIZER_FILE, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")  # for images
# Some readers and converters take the vocabulary from others than tokenizer.json.
VOCABULARY_FILES = (
    *("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
)
# Arguments of a load, which transformers 5 saves among a tokenizer's settings.
LOADER_ARGUMENTS = ("is_local", "local_files_only", "name_or_path", "trust_remote_code", "token", "revision")
DTYPE_KEYS = ("dtype", "torch_dtype")
READ_FROM_BOTH = "PreTrainedTokenizerFast"  # transformers 4 and 5 take tokenizer.json as it is for this class
# Settings of a configuration that say nothing of what the model computes.
NO_STRUCTURE = (*DTYPE_KEYS, "architectures", "_name_or_path", "transformers_version", "use_cache")


def write_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Write settings of a base. Some state an Infinity, which Python reads and writes, and JSON does not have."""
    write_text(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def own_config(
    base: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    unties: bool,
    vocabulary: int | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """config.json with the base's own keys.

    Args:
        base: The base's config.json.
        unties: Head and embeddings are two matrices now, although the base ties them.
        vocabulary: The embeddings' rows, if the run added tokens.
        rope_scaling: The recipe's.
    """
    config = copy.deepcopy(dict(base))
    config.pop("_name_or_path", None)  # it is another model now
    nested = [value for value in config.values() if isinstance(value, dict)]
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    if not any(key in config for key in DTYPE_KEYS):
        config["dtype" if str(config.get("transformers_version", "")).startswith("5") else "torch_dtype"] = None
    for section in (config, *nested):
        stated = [key for key in DTYPE_KEYS if key in section and (section is config or section[key])]
        section |= dict.fromkeys(stated, dtype_name(dtype))
    if unties:
        config["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    if vocabulary is not None:
        text["vocab_size"] = vocabulary
        if "vocab_size" in config:  # some state it twice
            config["vocab_size"] = vocabulary
    if rope_scaling is not None:
        from finetune.model.rope_scaling import scaled_settings

        text |= scaled_settings(text, rope_scaling)
    return config


def write_model_settings(folder: Path, model: PreTrainedModel, section: ModelSection, dtype: torch.dtype) -> None:
    """Rewrite what `model.save_pretrained` wrote into `folder` in the base's spelling."""
    base = folder_of(section.name_or_path, section.revision)
    if base is None or not (base / "config.json").is_file():
        return
    config, file = model.config, folder / "config.json"
    saved, own = json.loads(file.read_text("utf-8")), read_config(base / "config.json")
    is_part = own.get("model_type", config.model_type) != config.model_type  # of a multimodal model
    if is_part:
        shared = (*DTYPE_KEYS, "transformers_version")
        own = {key: own[key] for key in shared if key in own} | (own.get("text_config") or {})
        own |= {key: saved[key] for key in ("architectures", "model_type", "tie_word_embeddings") if key in saved}
    if not getattr(config, "quantization_config", None):  # stored in fewer bits, and trained in 16
        own.pop("quantization_config", None)
    structure = stored_structure(section)
    own = own_config(
        own,
        dtype=dtype,
        unties=structure is not None and structure.is_at_odds,
        vocabulary=config.get_text_config().vocab_size if section.new_tokens else None,
        rope_scaling=section.rope_scaling,
    )
    write_settings(file, own)
    if is_part and _structure(AutoConfig.from_pretrained(folder).to_dict()) != _structure(config.to_dict()):
        # The base has no section that is this part alone.
        write_settings(file, saved | {"dtype": dtype_name(dtype)})
    generation = folder / GENERATION
    if (base / GENERATION).is_file():
        own = read_object(base / GENERATION)
        if generation.is_file() and (ends := json.loads(generation.read_text("utf-8")).get("eos_token_id")) is not None:
            own["eos_token_id"] = ends  # the training may have added its stop tokens
        write_settings(generation, without_penalties(own))
    copy_code(folder, section)


def _structure(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NO_STRUCTURE}


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, section: ModelSection | None) -> None:
    """Save a run's tokenizer: the base's own files, with the run's new tokens and template in them.

    If transformers would read another tokenizer from them, because this folder has no config.json that corrects the
    class, tokenizer.json is the training's, and the class is the one that reads it as it is.

    Args:
        section: The recipe's model; None: a tokenizer that was read from nowhere keeps the library's spelling.
    """
    tokenizer.save_pretrained(str(folder))
    base = None if section is None else folder_of(section.name_or_path, section.revision)
    if section is None or base is None:
        return
    saved = json.loads((folder / TOKENIZER_SETTINGS).read_text("utf-8"))
    saved_tokens = (folder / TOKENIZER_FILE).read_bytes()
    if (base / TOKENIZER_SETTINGS).is_file():
        own = read_object(base / TOKENIZER_SETTINGS)
    else:  # the names that both releases read
        own = {key: value for key, value in saved.items() if key != "backend"}
        if own.get("tokenizer_class") == "TokenizersBackend":
            own["tokenizer_class"] = READ_FROM_BOTH
        if isinstance(extra := own.pop("extra_special_tokens", None), list):
            own["additional_special_tokens"] = extra
    own = {key: value for key, value in own.items() if key not in LOADER_ARGUMENTS}
    for path in (path for name in VOCABULARY_FILES for path in base.glob(name)):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    added = {id_: token for id_, token in tokenizer.added_tokens_decoder.items() if str(token) in section.new_tokens}
    if added:
        _state_tokens(folder, own, {id_: token.__getstate__() for id_, token in added.items()})
    if "chat_template" in own:  # releases before 4.51 read it here alone
        templates: Any = tokenizer.chat_template
        if isinstance(templates, dict):
            templates = [{"name": name, "template": text} for name, text in templates.items()]
        own["chat_template"] = templates
    write_settings(folder / TOKENIZER_SETTINGS, own)
    copy_code(folder, section)
    if "auto_map" in own or _is_read_back(tokenizer, folder):
        return
    (folder / TOKENIZER_FILE).write_bytes(saved_tokens)
    for settings in (own | {"tokenizer_class": READ_FROM_BOTH}, saved):
        write_settings(folder / TOKENIZER_SETTINGS, settings)
        if _is_read_back(tokenizer, folder):
            return


def _state_tokens(folder: Path, own: dict[str, Any], added: Mapping[int, dict[str, Any]]) -> None:
    """State new tokens, id -> its facts, wherever the base's files state theirs: `own` is tokenizer_config.json."""
    if "added_tokens_decoder" in own:
        own["added_tokens_decoder"] |= {str(id_): token for id_, token in added.items()}
    if (file := folder / "added_tokens.json").is_file():
        write_settings(file, read_object(file) | {token["content"]: id_ for id_, token in added.items()})
    tokens = read_object(folder / TOKENIZER_FILE, MOST_TOKENIZER)
    known = {token["id"] for token in tokens["added_tokens"]}
    tokens["added_tokens"] += [{"id": id_} | token for id_, token in added.items() if id_ not in known]
    write_settings(folder / TOKENIZER_FILE, tokens)


def _is_read_back(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Whether transformers reads this tokenizer from the folder."""
    try:
        with silenced():
            again: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # a class that this release does not know
        return False
    one, other = (
        (candidate.backend_tokenizer.to_str(), candidate.special_tokens_map, candidate.chat_template)
        for candidate in (again, cast("Any", tokenizer))
    )
    return bool(one == other)


def copy_code(folder: Path, section: ModelSection) -> None:
    """Copy the base's Python modules that the settings in `folder` name, with all that these import beside them.

    A module that is not on this machine is left on the Hub, and its name there is written.
    """
    base = folder_of(section.name_or_path, section.revision)
    for file in (folder / name for name in ("config.json", TOKENIZER_SETTINGS, *PROCESSOR_FILES)):
        settings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        names = settings.get("auto_map")
        if base is None or not names:
            continue

        def placed(name: Any) -> Any:
            if isinstance(name, dict):
                return {key: placed(value) for key, value in name.items()}
            if isinstance(name, list):
                return [placed(value) for value in name]
            if not isinstance(name, str) or "--" in name:  # the code of another repository
                return name
            module = base / f"{Path(name.rpartition('.')[0]).name}.py"
            if module.is_file():
                for path in (module, *map(Path, get_relative_import_files(module))):
                    if path.is_file() and base in path.parents and ".." not in path.parts:
                        target = folder / path.relative_to(base)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(path, target)
            elif not Path(resolve_model_path(section.name_or_path)).is_dir():
                return f"{section.name_or_path}--{name}"
            return name

        if (auto_map := placed(names)) != names:
            write_settings(file, settings | {"auto_map": auto_map})


def untrained_tensors(section: ModelSection, model: PreTrainedModel | None = None) -> dict[str, tuple[str, str]]:
    """The base's tensors that transformers does not load: name in the export -> file, and name there.

    Heads that predict several tokens (`mtp.*`, a layer after the last one), and buffers from earlier releases.

    Args:
        model: The exported model. A multimodal base's text part has names of its own, and takes only tensors that its
            class passes over too. None: the base itself.
    """
    structure = stored_structure(section)
    if structure is None or structure.quantised:  # the export has no scales
        return {}
    names = {name: (file, name) for name, file in structure.unread.items()}
    whole = None if model is None or not names else names_in_whole(model)
    if model is None or whole is None:
        return names
    for own, prefix in whole.places.items():
        names = {
            own + name.removeprefix(prefix) if name.startswith(f"{prefix}.") else name: place
            for name, place in names.items()
        }
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    kept = passed_over(kind, model.config, names)
    return {name: place for name, place in names.items() if name in kept}


def buffers_of_base(section: ModelSection, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The base's stored tensors that are no parameters, by the exported model's names: a router's correction of scores.

    Training leaves them as they are, and the trained weights lack them.
    """
    structure = stored_structure(section)
    places = {} if structure is None else structure.buffers
    whole = names_in_whole(model) if places else None
    tensors: dict[str, torch.Tensor] = {}
    for name, (file, stored) in places.items():
        own = name
        if whole is not None:  # the other parts are not exported
            inside = [prefix for prefix in whole.places.values() if name.startswith(f"{prefix}.")]
            if not inside:
                continue
            own = next(part for part, prefix in whole.places.items() if prefix == inside[0]) + name[len(inside[0]) :]
        with safe_open(file, framework="pt") as opened:
            tensors[own] = opened.get_tensor(stored)
    return tensors


def add_untrained(folder: Path, section: ModelSection, model: PreTrainedModel) -> None:
    """Put the base's untrained tensors, bit for bit, as a last shard beside the weights in `folder`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (path, stored) in untrained_tensors(section, model).items():
        with safe_open(path, framework="pt") as opened:
            tensors[name] = opened.get_tensor(stored)
    if not tensors:
        return
    files = [*sorted(folder.glob("model*.safetensors")), folder / f"{TEMPORARY_PREFIX}last"]
    save_file(tensors, files[-1], metadata={"format": "pt"})
    places: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, start=1):
        header, shard = read_header(file), f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(folder / shard)
        places |= dict.fromkeys(header, shard)
        total += sum(math.prod(facts.shape) * BITS[facts.dtype] // 8 for facts in header.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def untrained_in_words(section: ModelSection, model: PreTrainedModel | None = None) -> Iterator[str]:
    """One line each about the base's untrained tensors: those that an export has, and those that it lacks."""
    structure = stored_structure(section)
    unread = structure.unread if structure is not None else {}
    copied = untrained_tensors(section, model)
    if copied:
        yield (
            f"copied from the base as they are: {counted(len(copied), 'tensor')} that transformers does not load, "
            f"first {min(copied)}; a head that predicts several tokens was not trained along"
        )
    if lost := sorted(unread.keys() - {name for _, name in copied.values()}):
        yield (
            f"not exported: {counted(len(lost), 'tensor')} of the base that transformers does not load, first "
            f"{lost[0]}; to predict several tokens by them, a server needs the base's own"
        )
