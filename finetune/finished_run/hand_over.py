"""`finetune export --for ENGINE`: write the folder that a serving engine reads, and the command that serves it.

transformers   the whole model: as trained, as merged before, or merged now
peft           the adapter as it is, with a script that loads it onto its base
vllm           the whole model, or the adapter: as it is, or converted (serving_rules.py, vllm_adapter.py)
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from finetune.errors import FinetuneError
from finetune.files import TEMPORARY_PREFIX, disk_errors, publish_folder, remove_folder, write_json, write_text
from finetune.finished_run.load import FinishedRun, best_device, finished_run
from finetune.finished_run.merging import plan_merge, write_merged
from finetune.finished_run.own_folder import refuse_foreign, write_record
from finetune.finished_run.serving_rules import WORDS, judge_for_vllm
from finetune.finished_run.vllm_adapter import converted
from finetune.finished_run.weight_files import read_settings
from finetune.model.build import configuration
from finetune.model.packaged import resolve_model_path
from finetune.model.text_part import PEFT_PREFIX, auto_class
from finetune.recipe.schema import Recipe
from finetune.run_folder.facts import GENERATION, adapter_ends
from finetune.untrusted.library_words import in_one_line, words_of
from finetune.untrusted.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, look_at_adapter, patterns_of
from finetune.untrusted.programs import refuse_slow_patterns
from finetune.untrusted.safetensors_header import read_header

SERVING = "serving"  # in a run's folder
SERVING_RECORD = "serving.json"  # in what is written; only a folder with it is replaced
SCRIPT = "ask.py"
TEMPLATE = "chat_template.jinja"  # transformers' name for it
QUESTION = "Define: Apology"


@dataclass(frozen=True)
class HandOver:
    """A folder to be written, and how to serve it."""

    outcome: str  # accepted, converted, merged or whole model
    words: str  # one line about the result
    command: list[str]
    ask: list[str]
    write: Callable[[Path], None]  # makes the folder, complete except for the record
    notes: tuple[str, ...] = ()


def hand_over(
    run_dir: Path, engine: Literal["transformers", "peft", "vllm"], to: Path | None, log: Callable[[str], None]
) -> dict[str, Any]:
    """Write `to`, or RUN/serving/ENGINE, completely or not at all. Returns serving.json and the folder.

    Raises FinetuneError if there is no finished run, the engine cannot serve its result, or `to` holds other files.
    """
    run, folder = finished_run(run_dir), to or run_dir / SERVING / engine
    refuse_foreign(folder, SERVING_RECORD, below=run_dir)
    match engine:
        case "transformers":
            planned = _for_transformers(run, folder, log)
        case "peft":
            planned = _for_peft(run, folder)
        case "vllm":
            planned = _for_vllm(run, folder)
    record = {
        "run": run_dir.resolve().name,
        "engine": engine,
        "outcome": planned.outcome,
        "words": planned.words,
        "notes": list(planned.notes),
        "command": shlex.join(planned.command),
        "ask": shlex.join(planned.ask),
    }
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
    with disk_errors(folder, "the run is untouched; "):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_folder(temporary)
        try:
            planned.write(temporary)
            write_record(temporary, SERVING_RECORD, record)
            publish_folder(temporary, folder)
        finally:
            remove_folder(temporary)
    return {"folder": str(folder), **record}


def describe_hand_over(facts: Mapping[str, Any]) -> str:
    """The verb's output."""
    lines = [f"for {facts['engine']}, {facts['words']}: {facts['folder']}"]
    lines += [f"note: {note}" for note in facts["notes"]]
    if facts["command"] != facts["ask"]:
        lines += ["serve it:", f"  {facts['command']}"]
    return "\n".join([*lines, "ask it:", f"  {facts['ask']}"])


def _for_transformers(run: FinishedRun, folder: Path, log: Callable[[str], None]) -> HandOver:
    recipe, path, merged = run.recipe, folder.resolve(), run.folder / "merged"
    command, ask = ["transformers", "serve", str(path)], ["python", str(path / SCRIPT), QUESTION]
    if recipe.model.trust_remote_code:
        command.append("--trust-remote-code")
    if recipe.lora is None or merged.is_dir():
        source, automatic = run.product, "AutoModelForCausalLM"
        outcome, words = "whole model", "the whole model as trained"
        if recipe.lora is not None:
            source, automatic = merged, auto_class(configuration(recipe)).__name__
            outcome, words = "merged", "the merged model in merged/"

        def link(target: Path) -> None:
            _link_files(source, target)
            write_text(target / SCRIPT, _script_of_a_model(recipe, automatic))

        return HandOver(outcome, words, command, ask, link)
    merge = plan_merge(recipe, run.folder, best_device())

    def write(target: Path) -> None:
        dtype = getattr(torch, recipe.model.dtype)
        write_merged(merge, target, dtype, dequantized=recipe.quantization is not None, log=log)
        write_text(target / SCRIPT, _script_of_a_model(recipe, auto_class(configuration(recipe)).__name__))

    note = f"nothing was compared; this merges and compares: {shlex.join(['finetune', 'merge', str(run.folder)])}"
    return HandOver("merged", "the adapter merged into its base", command, ask, write, (note,))


def _for_peft(run: FinishedRun, folder: Path) -> HandOver:
    if run.recipe.lora is None:
        raise FinetuneError(f"{run.folder}: all weights were trained, so there is no adapter; use --for transformers")
    script = _script_of_an_adapter(run)

    def write(target: Path) -> None:
        shutil.copytree(run.product, target)
        write_text(target / SCRIPT, script)

    command = ["python", str(folder.resolve() / SCRIPT), QUESTION]
    return HandOver("accepted", "the adapter as it is", command, command, write)


def _for_vllm(run: FinishedRun, folder: Path) -> HandOver:
    recipe, path = run.recipe, str(folder.resolve())
    name = run.folder.resolve().name
    options = ["--dtype", recipe.model.dtype]
    if recipe.model.trust_remote_code:
        options.append("--trust-remote-code")
    ask = _curl(name, recipe, chat=(run.product / TEMPLATE).is_file())
    if recipe.lora is None:
        # With "=", a name that begins with a dash is no option.
        command = ["vllm", "serve", path, f"--served-model-name={name}", *options]
        return HandOver(
            "whole model", "the whole model as trained", command, ask, lambda target: _link_files(run.product, target)
        )
    settings, config = look_at_adapter(run.product), read_settings(recipe.model, "config.json")
    header = read_header(run.product / ADAPTER_WEIGHTS)
    # A stranger's pattern may take exponential time on these paths.
    paths = {key.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for key in header}
    refuse_slow_patterns(str(run.product / ADAPTER_CONFIG), patterns_of(settings), paths)
    verdict = judge_for_vllm(settings, header, config or {}, quantized=recipe.quantization is not None)
    if verdict.outcome == "refused":
        merge = shlex.join(["finetune", "merge", str(run.folder)])
        trusted = options[2:]
        serve = shlex.join(["vllm", "serve", str(run.folder / "merged"), *trusted])
        raise FinetuneError(
            f"{run.folder}: vLLM cannot serve this adapter: {'; '.join(verdict.refusals)}; "
            f"merge it: {merge}, then: {serve}"
        )
    if recipe.model.revision != "main":
        options += ["--revision", recipe.model.revision]
    if (run.product / TEMPLATE).is_file():  # vLLM takes the base's otherwise, and training may have had another
        options += ["--chat-template", f"{path}/{TEMPLATE}"]
    if (run.product / GENERATION).is_file():  # the base's lists other end tokens
        options += ["--generation-config", path]
    command = ["vllm", "serve", _base(recipe), *verdict.flags, "--lora-modules", lora_module(name, path), *options]
    outcome, words = "accepted", f"the adapter as it is, rank {verdict.rank}"
    if verdict.outcome == "converted":
        with in_one_line(lambda error: FinetuneError(f"{run.product}: cannot be converted: {words_of(error)}")):
            tensors, plain = converted(run, settings, verdict)
        outcome = "converted"
        words = f"the adapter converted, rank {verdict.rank}: {'; '.join(WORDS[each] for each in verdict.conversions)}"

    def write(target: Path) -> None:
        shutil.copytree(run.product, target)
        if outcome == "converted":
            save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            write_json(target / ADAPTER_CONFIG, plain)

    return HandOver(outcome, words, command, ask, write, verdict.notes)


def lora_module(name: str, path: str) -> str:
    """The value of vLLM's --lora-modules: `name=path`, or JSON if that would be read in another way.

    vLLM takes text with "=" and without "," for the first form. 0.32 and earlier split it at every "=".
    """
    if re.search("[=,]", name + path) or name.startswith("-"):
        return json.dumps({"name": name, "path": path}, ensure_ascii=False)
    return f"{name}={path}"


def _base(recipe: Recipe) -> str:
    """The base as an engine finds it: a folder's path, or its name on the Hub."""
    path = resolve_model_path(recipe.model.name_or_path)
    if Path(path).is_dir():
        return str(Path(path).resolve())
    return path


def _link_files(source: Path, target: Path) -> None:
    """Give each file a second name in `target`, so that a whole model takes no more disk; a copy on another disk."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # another disk, or a file system without hard links
            shutil.copyfile(one, other)

    shutil.copytree(source, target, copy_function=link)


def _curl(model: str, recipe: Recipe, *, chat: bool) -> list[str]:
    """A request to a server on this machine, greedy, in the form that the model was trained on."""
    body: dict[str, Any] = {"model": model, "max_tokens": 64, "temperature": 0}
    place = "completions"
    if chat:
        place = "chat/completions"
        body["messages"] = [{"role": "user", "content": QUESTION}]
        if variables := recipe.data.chat_template_kwargs:
            body["chat_template_kwargs"] = variables
    else:
        body["prompt"] = QUESTION
    address = f"http://localhost:8000/v1/{place}"
    return ["curl", address, "-H", "Content-Type: application/json", "-d", json.dumps(body, ensure_ascii=False)]


def _script_of_a_model(recipe: Recipe, automatic: str) -> str:
    trust = ", trust_remote_code=True" if recipe.model.trust_remote_code else ""
    return SCRIPT_TEXT.format(
        doc="Ask the model in this folder",
        imports=f"from transformers import {automatic}, AutoTokenizer",
        trust=trust,
        load=f'model = {automatic}.from_pretrained(folder, dtype="auto"{trust})',
        variables=recipe.data.chat_template_kwargs,
        ends="",
    )


def _script_of_an_adapter(run: FinishedRun) -> str:
    recipe = run.recipe
    section, automatic = recipe.model, auto_class(configuration(recipe)).__name__
    options: dict[str, Any] = {"dtype": section.dtype}
    if section.revision != "main":
        options["revision"] = section.revision
    trust = ""
    if section.trust_remote_code:
        options["trust_remote_code"] = True
        trust = ", trust_remote_code=True"
    words = [f"{key}={value!r}" for key, value in options.items()]
    names = ["AutoTokenizer", automatic]
    if recipe.quantization is not None:
        words.append(f"quantization_config=BitsAndBytesConfig(**{recipe.quantization.model_dump()!r})")
        names.append("BitsAndBytesConfig")
    load = f"base = {automatic}.from_pretrained({_base(recipe)!r}, {', '.join(words)})\n"
    if section.new_tokens:
        load += "rows = max(len(tokenizer), base.get_input_embeddings().num_embeddings)\n"
        load += "base.resize_token_embeddings(rows, mean_resizing=False)  # for the new tokens\n"
    return SCRIPT_TEXT.format(
        doc="Load the adapter in this folder onto its base, and ask it",
        imports=f"from peft import PeftModel\nfrom transformers import {', '.join(sorted(names))}",
        trust=trust,
        load=f"{load}model = PeftModel.from_pretrained(base, folder).eval()",
        variables=recipe.data.chat_template_kwargs,
        ends="".join(f", eos_token_id={ends}" for ends in [adapter_ends(run.product)] if ends),
    )


SCRIPT_TEXT = '''"""{doc}: python ask.py QUESTION"""

import sys
from pathlib import Path

{imports}

folder = Path(__file__).resolve().parent
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
{load}
if tokenizer.chat_template is None:
    prompt = tokenizer(sys.argv[1], return_tensors="pt")
else:
    chat = [{{"role": "user", "content": sys.argv[1]}}]
    settings = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = tokenizer.apply_chat_template(chat, **settings, **{variables!r})
answer = model.generate(**prompt.to(model.device), max_new_tokens=64, do_sample=False{ends})
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
'''
