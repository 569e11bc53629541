"""`finetune export --for ENGINE`: write the folder that a serving engine reads, and the command that serves it.

ollama, llama.cpp   a GGUF, by gguf.py
transformers   the whole model: as trained, or merged/, which is made if it is absent or older than the adapter
peft           the adapter as it is, with a script that loads it onto its base
vllm           the adapter as it is if vLLM computes it as peft does (vllm.py), otherwise the whole model
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from finetune.base.location import resolve_model_path
from finetune.errors import FinetuneError
from finetune.files import making, publish_folder, write_text
from finetune.finished_run import FinishedRun, finished_run
from finetune.hand_over.gguf import hand_over_gguf
from finetune.hand_over.merge import whole_model
from finetune.hand_over.own_folder import refuse_foreign, write_record
from finetune.hand_over.vllm import lora_options, why_merged
from finetune.library_errors import library_errors
from finetune.model.build import configuration
from finetune.model.text_part import auto_class
from finetune.recipe.schema import Recipe
from finetune.run_folder.facts import GENERATION
from finetune.untrusted.config_sizes import MXFP4, stored_format
from finetune.untrusted.model_folder import ADAPTER_WEIGHTS, look_at_adapter
from finetune.untrusted.safetensors_header import read_header

SERVING = "serving"  # in a run's folder
SERVING_RECORD = "serving.json"  # in what is written; only a folder with it is replaced
SCRIPT = "ask.py"
TEMPLATE = "chat_template.jinja"  # transformers' name for it
QUESTION = "Define: Apology"


def export_for(run_dir: Path, engine: str, to: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Write what an engine reads, and say the command that serves it. Raises FinetuneError."""
    if engine not in ("ollama", "llama.cpp"):
        facts = hand_over(run_dir, engine, to, say)  # type: ignore[arg-type]  # the verb checked it
        lines = [f"for {engine}, {facts['words']}: {facts['folder']}", *(f"note: {note}" for note in facts["notes"])]
        if facts["command"] != facts["ask"]:
            lines += ["serve it:", f"  {facts['command']}"]
        say("\n".join([*lines, "ask it:", f"  {facts['ask']}"]))
        return facts
    if to is not None:
        raise FinetuneError(f"--to: --for {engine} writes gguf/ in the run's folder; leave --to out")
    facts = hand_over_gguf(run_dir, engine, say)  # type: ignore[arg-type]  # one of the two
    text = f"for {engine}, in 8 bits: {facts['file']}\nserve it:\n  {facts['command']}"
    text += "".join(f"\nnote: {note}" for note in facts["notes"])
    if engine == "ollama":
        text += f"\nask it:\n  ollama run {facts['command'].split()[2]} 'your question'"
    say(text)
    return facts


def hand_over(
    run_dir: Path, engine: Literal["transformers", "peft", "vllm"], to: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write `to`, or RUN/serving/ENGINE, completely or not at all. Returns serving.json and the folder.

    Raises FinetuneError if there is no finished run, the engine cannot serve its result, or `to` holds other files.
    """
    run, folder = finished_run(run_dir), to or run_dir / SERVING / engine
    refuse_foreign(folder, SERVING_RECORD, below=run_dir)
    recipe, path, name = run.recipe, str(folder.resolve()), run_dir.resolve().name
    if recipe.lora is None and engine == "peft":
        raise FinetuneError(f"{run_dir}: all weights were trained, so there is no adapter; use --for transformers")
    settings: Mapping[str, Any] = {}
    reason = None  # why vLLM gets no adapter
    if engine == "vllm" and recipe.lora is not None:
        settings = look_at_adapter(run.product)
        reason = why_merged(settings, read_header(run.product / ADAPTER_WEIGHTS))
    is_adapter = recipe.lora is not None and engine != "transformers" and reason is None
    source, outcome, words, notes = run.product, "accepted", "the adapter as it is", list[str]()
    if not is_adapter:
        source, outcome, words = whole_model(run, 0, say), "whole model", "the whole model as trained"
        if recipe.lora is not None:
            outcome, words = "merged", f"the merged model in {source.name}/"
        if reason is not None:
            words += f", because {reason}"
    trust = ["--trust-remote-code"] if recipe.model.trust_remote_code else []
    has_template = (run.product / TEMPLATE).is_file()
    if engine == "vllm":
        ask, options = _curl(name, run, chat=has_template), ["--dtype", recipe.model.dtype, *trust]
        if run.conversation.tools:  # else it returns calls as text
            templates = "".join(run.conversation.templates.values())
            parser = next((parser for text, parser in CALL_PARSERS.items() if text in templates), "PARSER")
            options += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
        # With "=", a name that begins with a dash is no option.
        served = [path, f"--served-model-name={name}"]
        if is_adapter:
            served = [_base(recipe), *lora_options(name, path, settings["r"])]
            words += f", rank {settings['r']}"
            if recipe.model.revision != "main":
                options += ["--revision", recipe.model.revision]
            if has_template:  # vLLM takes the base's otherwise, and training may have had another
                options += ["--chat-template", f"{path}/{TEMPLATE}"]
            if (run.product / GENERATION).is_file():  # the base's lists other end tokens
                options += ["--generation-config", path]
            if positions := _scaled_positions(recipe):
                options += ["--hf-overrides", json.dumps(positions)]
            if recipe.quantization is not None:
                notes.append(
                    "it was trained over the quantised base, and vLLM adds it to the base's own weights; finetune "
                    "merge measures how much that changes"
                )
            if "PARSER" in options:
                notes.append("no parser is known for this template's calls; name one of vLLM's in place of PARSER")
        command = ["vllm", "serve", *served, *options]
    else:
        ask = ["python", f"{path}/{SCRIPT}", QUESTION]
        command = ask if is_adapter else ["transformers", "serve", path, *trust]
    record = {
        "run": name,
        "engine": engine,
        "outcome": outcome,
        "words": words,
        "notes": notes,
        "command": shlex.join(command),
        "ask": shlex.join(ask),
    }

    def link(file: str, target: str) -> None:
        """A second name for each of the whole model's files, so that they take no more disk."""
        try:
            os.link(file, target)
        except OSError:  # another disk, or a file system without hard links
            shutil.copyfile(file, target)

    with library_errors(writing=folder, kept="the run is untouched; "), making(folder) as temporary:
        shutil.copytree(source, temporary, copy_function=shutil.copy2 if is_adapter else link)
        if engine != "vllm":
            write_text(temporary / SCRIPT, _script(run, adapter=is_adapter))
        elif (
            is_adapter and len(run.conversation.templates) > 1
        ):  # vLLM takes one, and would take the default for tools too
            write_text(temporary / TEMPLATE, run.conversation.template_for_engines())
        write_record(temporary, SERVING_RECORD, record)
        publish_folder(temporary, folder)
    return {"folder": str(folder), **record}


def _scaled_positions(recipe: Recipe) -> dict[str, Any]:
    """The part of model.rope_scaling that the base's config.json lacks; an adapter has no config.json."""
    if recipe.model.rope_scaling is None:
        return {}
    text: Any = configuration(recipe).get_text_config()
    return {"rope_parameters": text.rope_parameters, "max_position_embeddings": text.max_position_embeddings}


def _base(recipe: Recipe) -> str:
    """The base as an engine finds it: a folder's path, or its name on the Hub."""
    path = Path(resolve_model_path(recipe.model.name_or_path))
    return str(path.resolve()) if path.is_dir() else str(path)


# A text in a chat template -> vLLM's parser for the calls that it writes. The first one counts.
CALL_PARSERS = {"<function=": "qwen3_coder", "<arg_key>": "glm45", "<tool_call>": "hermes", "[TOOL_CALLS]": "mistral",
                "ipython": "llama3_json"}  # fmt: skip


def _curl(model: str, run: FinishedRun, *, chat: bool) -> list[str]:
    """A request to a server on this machine, greedy, in the form that the model was trained on."""
    body: dict[str, Any] = {"model": model, "max_tokens": 64, "temperature": 0}
    if chat:
        body["messages"] = [*run.conversation.opening(), {"role": "user", "content": QUESTION}]
        if variables := run.recipe.data.chat_template_kwargs:
            body["chat_template_kwargs"] = variables
    else:
        body["prompt"] = QUESTION
    address = f"http://localhost:8000/v1/{'chat/' if chat else ''}completions"
    return ["curl", address, "-H", "Content-Type: application/json", "-d", json.dumps(body, ensure_ascii=False)]


def _script(run: FinishedRun, *, adapter: bool) -> str:
    """ask.py for a whole model, or for an adapter and its base."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    section, quantization, automatic = run.recipe.model, run.recipe.quantization, "AutoModelForCausalLM"
    if run.recipe.lora is not None:
        config = configuration(run.recipe)
        automatic = auto_class(config).__name__
        if stored_format(config.to_dict()) == MXFP4:  # transformers reads it
            quantization = None
    names, options = [automatic, "AutoTokenizer"], [f"dtype={section.dtype!r}"]
    trust = ", trust_remote_code=True" if section.trust_remote_code else ""
    has_settings = (run.product / GENERATION).is_file()  # an adapter has them where its base's differ
    if adapter:
        if section.revision != "main":
            options.append(f"revision={section.revision!r}")
        if section.trust_remote_code:
            options.append("trust_remote_code=True")
        options += [f"{key}={value!r}" for key, value in _scaled_positions(run.recipe).items()]
        if quantization is not None:
            names.append("BitsAndBytesConfig")
            options.append(f"quantization_config=BitsAndBytesConfig(**{quantization.model_dump()!r})")
        if has_settings:
            names.append("GenerationConfig")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template(f"{SCRIPT}.jinja").render(
        base=repr(_base(run.recipe)) if adapter else None,
        names=sorted(names),
        auto_class=automatic,
        options=", ".join(options),
        trust=trust,
        new_tokens=section.new_tokens,
        variables=repr(run.recipe.data.chat_template_kwargs),
        has_settings=has_settings,
        opening=repr(run.conversation.opening()).removesuffix("]") + ", " * bool(run.conversation.opening()),
    )
