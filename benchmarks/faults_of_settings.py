"""Faults in how rows are read, how a training is started and ended, and what is told of it.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

COLUMNS, SOURCES = "data/test_columns.py", "data/test_sources.py"
VARIABLES, NOTES = "tokens/test_template_variables.py", "training/test_batch_notes.py"
STRESS, REMEDIES = "tokens/test_stress_templates.py", "tokens/test_mask_remedies.py"
RANKS, EXPORT = "launch/test_local_ranks.py", "finished_run/test_export_step.py"

OF_ROWS = (
    Fault("the recipe's columns are ignored", "data/columns.py", "if not self.columns:", "if True:", COLUMNS),
    Fault(
        "prompt and completion are swapped",
        "data/formats.py",
        'prompt, completion = view["prompt"], view["completion"]',
        'prompt, completion = view["completion"], view["prompt"]',
        COLUMNS,
    ),
    Fault(
        "roles of the recipe are ignored in messages",
        "data/messages.py",
        'message.get("role") if isinstance(message, dict) and roles else None',
        "None",
        COLUMNS,
    ),
    Fault(
        "roles of the recipe lose to ShareGPT's known ones",
        "data/formats.py",
        "{**SHAREGPT_ROLES, **layout.roles}",
        "{**layout.roles, **SHAREGPT_ROLES}",
        COLUMNS,
    ),
    Fault(
        "the system column is dropped",
        "data/formats.py",
        "if system := _system(view, checked):",
        "if (system := _system(view, checked)) and False:",
        COLUMNS,
    ),
    Fault(
        "Alpaca's history is dropped",
        "data/formats.py",
        '[*_history(view), {"role": "user"',
        '[{"role": "user"',
        COLUMNS,
    ),
    Fault(
        "Alpaca's reasoning is dropped",
        "data/formats.py",
        'answer["reasoning_content"] = checked_text(view[column], column)',
        "pass",
        COLUMNS,
    ),
    Fault(
        "reasoning stays under a key that the template does not read",
        "tokens/encoder.py",
        "renamed.append(others | {read[0]: message[key]})",
        "renamed.append(message)",
        VARIABLES,
    ),
    Fault(
        "an answer is learned without its reasoning",
        "tokens/encoder.py",
        "self._check_reasoning(chat, index, rendered)",
        "pass",
        VARIABLES,
    ),
    Fault(
        "the template's variables of a data set are ignored",
        "data/formats.py",
        "{**layout.chat_template_kwargs, **own}",
        "own",
        COLUMNS,
    ),
    Fault(
        "a dialogue that ends without an answer is not told",
        "data/row_reader.py",
        'self._unanswered += read.messages[-1]["role"] != "assistant"',
        "pass",
        COLUMNS,
    ),
    Fault(
        "rows tokenised under other columns are taken from the cache",
        "tokens/cache.py",
        'include={"format", "columns", "roles", "chat_template_kwargs"}',
        'include={"format", "roles", "chat_template_kwargs"}',
        "tokens/test_cache.py -k address",
    ),
    Fault(
        "a misspelt split of a folder is all of its files",
        "data/splits.py",
        "    raise DataError([_no_split(str(folder), name, list(splits))])",
        "    return list(files)",
        SOURCES,
    ),
    Fault(
        "a misspelt split of named files is accepted",
        "data/splits.py",
        'if name != "train" and not all(',
        "if False and not all(",
        SOURCES,
    ),
    Fault(
        "the revision of a data set is ignored",
        "data/sources.py",
        ", revision=entry.revision\n",
        "\n",
        SOURCES,
    ),
    Fault(
        "a folder of test rows alone is trained on",
        "data/splits.py",
        'return splits or {"train": list(files)}',
        'return {"train": list(files)} | splits',
        SOURCES,
    ),
)

OF_STARTS_AND_ENDS = (
    Fault(
        "AdamW's betas are not the recipe's",
        "model/optimizer.py",
        "(training.adam_beta1, training.adam_beta2)",
        "(0.9, 0.999)",
        "model/test_optimizer.py -k definition",
    ),
    Fault(
        "bitsandbytes' AdamW has its own constants",
        "model/optimizer.py",
        "(groups, **settings)\n    return",
        "(groups, lr=settings['lr'], weight_decay=0.0)\n    return",
        "model/test_optimizer.py -k definition",
    ),
    Fault(
        "the exit code of a rank is lost",
        "launch/local_ranks.py",
        "return int(codes[self._first_failed])",
        "return 1",
        f"{RANKS} -k exit_code",
    ),
    Fault(
        "a second Ctrl-C ends nothing",
        "launch/local_ranks.py",
        "received.count(signal.SIGINT) > 1",
        "False",
        f"{RANKS} -k second",
    ),
    Fault(
        "ranks get no SIGTERM",
        "launch/local_ranks.py",
        "self._send(signal.SIGTERM)",
        "pass",
        f"{RANKS} -k signal_reaches",
    ),
    Fault(
        "oneDNN's cache is not bounded",
        "launch/cpu_memory.py",
        'environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KEPT)',
        "pass",
        "launch/test_cpu_memory.py",
    ),
    Fault(
        "a training does not bound what libraries keep",
        "train.py",
        "    bound_libraries()  # before torch loads, and so the next\n",
        "",
        "launch/test_cpu_memory.py",
    ),
    Fault("idle ranks are not told", "training/batch_notes.py", "*idle_ranks(plan),", "", NOTES),
    Fault("few steps are not told", "training/batch_notes.py", "*few_steps(recipe, plan),", "", NOTES),
    Fault(
        "tokens a step are those of a rank",
        "training/batch_notes.py",
        "min(plan.global_batch_size, plan.total_rows))\n\n\ndef _idle",
        "min(plan.per_device_batch_size, plan.total_rows))\n\n\ndef _idle",
        NOTES,
    ),
    Fault(
        "lost lines of metrics are not told",
        "run_folder/facts.py",
        'if line["step"] - each > reached:',
        "if False:",
        "run_folder/test_folder.py -k lost_metrics",
    ),
    Fault(
        "run_state.json keeps the step of the start",
        "training/run_output.py",
        'mark_step(self._run_dir, line["step"])',
        "pass",
        "training/test_run_output.py",
    ),
    Fault(
        "~ stays ~", "paths.py", 'if text.startswith("~") and "{" not in text', "if False", "recipe/test_local_paths.py"
    ),
    Fault(
        "the command that continues is not quoted",
        "launch/launcher.py",
        "return shlex.join(words)",
        'return " ".join(words)',
        "launch/test_launcher.py",
    ),
    Fault(
        "the command after an export is quoted twice",
        "finished_run/export_step.py",
        'str(facts["folder"])])',
        'shlex.quote(facts["folder"])])',
        f"{EXPORT} -k shell",
    ),
    Fault(
        "a smoothed loss does not weigh its lines by tokens",
        "report/pictures.py",
        "y * weight, sums[-1][1] + weight",
        "y, sums[-1][1] + 1",
        "report/test_run_page.py -k smoothed",
    ),
)

OF_MASKS = (
    Fault(
        "an answer ends with its first control token",
        "tokens/assistant_spans.py",
        "            return tokens[-1]\n",
        "            return tokens[0]\n",
        STRESS,
    ),
    Fault(
        "a token between two calls ends an answer",
        "tokens/assistant_spans.py",
        "if has_calls and tokens[-1].group() in habits.between:",
        "if False:",
        STRESS,
    ),
    Fault(
        "the end of a document is the end of its last turn",
        "tokens/assistant_spans.py",
        "dict.fromkeys([text.removesuffix(habits.closing), text])",
        "[text]",
        STRESS,
    ),
    Fault(
        "an answer may go on after the token on which the model stops",
        "tokens/assistant_spans.py",
        "            if inside:\n",
        "            if False:\n",
        STRESS,
    ),
    Fault(
        "an answer does not follow its prompt's last words",
        "tokens/assistant_spans.py",
        "return prompt + thought + chat.text[start:], literals",
        "return chat.text[:start] + thought + chat.text[start:], literals",
        STRESS,
    ),
    Fault(
        "a shortened answer of history is learned",
        "tokens/marks.py",
        "is_kept = content in marked.ended and (content in marked.begun",
        "is_kept = content in marked.ended or (content in marked.begun",
        STRESS,
    ),
    Fault(
        "an answer of history holds other messages",
        "tokens/assistant_spans.py",
        "if message != index and start < position < stop:",
        "if False:",
        "tokens/test_masks_by_rendering.py -k gemma4",
    ),
    Fault(
        "calls are given as objects alone",
        "tokens/chat_template.py",
        "for text_arguments in (False, True)",
        "for text_arguments in (False,)",
        REMEDIES,
    ),
    Fault(
        "arguments are written as Python writes an object",
        "tokens/chat_template.py",
        " and str(arguments) not in text:",
        ":",
        REMEDIES,
    ),
    Fault(
        "a remedy is told without being tried",
        "tokens/encoder.py",
        "if change != message and self._works(replace(chat, messages=messages), index):",
        "if change != message:",
        REMEDIES,
    ),
    Fault(
        "any control token is taken for the end of a turn",
        "report/preview.py",
        'unfinished(store, store.facts["stops"], data.max_length)',
        "unfinished(store, range(100_000), data.max_length)",
        REMEDIES,
    ),
    Fault(
        "an edited template file trains on old tokens",
        "tokens/encoder.py",
        "repr(self._data.chat_template and read_source(self._data.chat_template))",
        "repr(self._data.chat_template)",
        "tokens/test_cache.py",
    ),
    Fault(
        "a developer's turn and the system column are two system turns",
        "data/formats.py",
        'not in ("system", "developer"):',
        'not in ("system",):',
        COLUMNS,
    ),
    Fault(
        "rendered chats in texts are not told",
        "data/row_reader.py",
        "self._written[0] + 1, self._written[1] or written",
        "0, written",
        COLUMNS,
    ),
)

FAULTS_OF_SETTINGS = OF_ROWS + OF_MASKS + OF_STARTS_AND_ENDS
