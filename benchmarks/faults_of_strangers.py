"""Faults in what is read of strangers: models' folders, headers, data files, templates, code, secrets, terminal text.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

CORPUS, HEADER = "corpus/test_corpus.py", "untrusted/test_safetensors_header.py"
CHILDREN, OUTPUT, CODE = "untrusted/test_children.py", "untrusted/test_output.py", "untrusted/test_model_code.py"
BAD_DATA, SIZES = "data/test_bad_data.py", "data/test_unusual_sizes.py"
SECRETS = "test_redaction.py"

OF_MODELS = (
    Fault(
        "an index may name pickles",
        "untrusted/model_folder.py",
        'plain = name.endswith(".safetensors") and not',
        "plain = not",
        f"{CORPUS} -k index_p",
    ),
    Fault(
        "an index may name files of other folders",
        "untrusted/model_folder.py",
        " and Path(name).name == name",
        "",
        f"{CORPUS} -k index",
    ),
    Fault(
        "weights of integers are cast",
        "untrusted/model_folder.py",
        "if facts.dtype not in FLOATS and not _is_a_buffer(name, facts):",
        "if False:",
        f"{CORPUS} -k stored_as",
    ),
    Fault(
        "an adapter may lie beside a model",
        "untrusted/model_folder.py",
        "if (folder / ADAPTER_CONFIG).exists() and (folder / CONFIG).exists():",
        "if False:",
        f"{CORPUS} -k beside",
    ),
    Fault(
        "tensors of a file may overlap",
        "untrusted/safetensors_header.py",
        "        if begin != at:\n",
        "        if begin > at:\n",
        f"{CORPUS} -k weights",
    ),
    Fault(
        "a tensor's bytes need not be those of its shape",
        "untrusted/safetensors_header.py",
        "!= 8 * (end - begin):",
        "> 8 * (end - begin):",
        f"{CORPUS} -k weights",
    ),
    Fault(
        "a header may be of any length",
        "untrusted/safetensors_header.py",
        "length > min(MOST_HEADER, size - LENGTH_BYTES):",
        "length > size - LENGTH_BYTES:",
        HEADER,
    ),
    Fault(
        "a file's JSON may be of any depth",
        "untrusted/json_files.py",
        "    if depth_of(value) > MOST_DEPTH:\n",
        "    if False:\n",
        f"{CORPUS} -k deep",
    ),
    Fault(
        "a key may stand twice in a header",
        "untrusted/json_files.py",
        "object_pairs_hook=_unique_keys if unique else None",
        "object_pairs_hook=None",
        f"{CORPUS} -k twice",
    ),
    Fault(
        "sizes of a configuration have no upper bound",
        "untrusted/config_sizes.py",
        "<= value <= most:",
        "<= value:",
        f"{CORPUS} -k huge_vision",
    ),
    Fault(
        "sizes of a model's parts are not looked at",
        "untrusted/config_sizes.py",
        'yield f"{name}: ", section',
        "pass",
        f"{CORPUS} -k text_config",
    ),
    Fault(
        "heads need not be a multiple of those they share",
        "untrusted/config_sizes.py",
        "and heads % shared:",
        "and False:",
        f"{CORPUS} -k heads_clash",
    ),
    Fault(
        "a git-lfs pointer is taken for the file",
        "untrusted/kinds.py",
        '(b"version https://git-lfs"',
        '(b"version of another"',
        f"{CORPUS} -k pointer",
    ),
    Fault(
        "a device is opened as a file",
        "paths.py",
        "    if kind == stat.S_IFREG:",
        "    if kind in (stat.S_IFREG, stat.S_IFCHR):",
        OUTPUT,
    ),
)

OF_PROGRAMS = (
    Fault(
        "a child may take any memory",
        "untrusted/children.py",
        "    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))\n",
        "",
        CHILDREN,
    ),
    Fault(
        "what was refused is trusted the next time",
        "untrusted/children.py",
        'if process.returncode == 0 and word[0] == "ok":',
        "if process.returncode == 0:",
        CHILDREN,
    ),
    Fault(
        "another file is trusted by the first one's hash",
        "untrusted/children.py",
        "known_by or asked",
        "known_by",
        CHILDREN,
    ),
    Fault(
        "a template is not tried with the prompt for an answer",
        "untrusted/programs.py",
        "for prompt in (False, True):",
        "for prompt in (False,):",
        CHILDREN,
    ),
    Fault(
        "a template is not tried with tools",
        "untrusted/programs.py",
        "for tools in (None, [tool]):",
        "for tools in (None,):",
        CHILDREN,
    ),
    Fault(
        "a template is tried with a short chat alone",
        "untrusted/programs.py",
        ', [{"role": "system", "content": "s"}, *turns * 16]):',
        "):",
        CHILDREN,
    ),
    Fault(
        "a repeated group cannot be slow",
        "untrusted/programs.py",
        "len(pattern) < 10_000 and groups is None and",
        "len(pattern) < 10_000 and",
        CHILDREN,
    ),
    Fault(
        "code of a stranger's run may run",
        "untrusted/model_code.py",
        'if os.environ.get(CONSENT) != "1" and not is_trusted(_key(name, revision)):',
        "if False:",
        f"{CODE} -k strangers_run",
    ),
    Fault(
        "code that was changed stays trusted",
        "untrusted/model_code.py",
        'sorted(folder.glob("*.py")) if folder.is_dir() else []',
        "[]",
        f"{CODE} -k until_its_code",
    ),
)

OF_ROWS_AND_WORDS = (
    Fault(
        "a line may be of any length",
        "data/readers.py",
        "        if len(raw) > MAX_ROW_BYTES:\n            yield",
        "        if False:\n            yield",
        BAD_DATA,
    ),
    Fault(
        "a byte order mark belongs to the first row",
        "data/readers.py",
        "        start = len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0\n",
        "        start = 0\n",
        "data/test_sources.py",
    ),
    Fault(
        "a row's key may stand twice",
        "data/readers.py",
        "    if len(values) < len(pairs):\n        seen",
        "    if False:\n        seen",
        BAD_DATA,
    ),
    Fault(
        "nulls that fill a table up reach the model",
        "data/readers.py",
        "for key, item in value.items() if item is not None}",
        "for key, item in value.items()}",
        "data/test_sources.py",
    ),
    Fault(
        "a table's column may stand twice",
        "data/parquet_rows.py",
        "    if twice:\n",
        "    if False:\n",
        f"{CORPUS} -k column_twice",
    ),
    Fault("a check of data is silent", "data/check.py", "if time.monotonic() > due:", "if False:", SIZES),
    Fault(
        "all unknown keys of a message are compared",
        "data/messages.py",
        "islice((key for key in keys if key not in MESSAGE_KEYS), COMPARED_KEYS)",
        "(key for key in keys if key not in MESSAGE_KEYS)",
        SIZES,
    ),
    Fault(
        "misspelt keys of a message are taken",
        "data/messages.py",
        "        if near and near not in message:\n",
        "        if False:\n",
        SIZES,
    ),
    Fault(
        "the names of columns are kept without end",
        "data/row_reader.py",
        " and len(self._unused) < MOST_NAMES",
        "",
        SIZES,
    ),
    Fault(
        "others' escape sequences reach the terminal",
        "output_stream.py",
        "lambda match: match[1] or REPLACEMENT, text)",
        "lambda match: match[0], text)",
        OUTPUT,
    ),
    Fault(
        "text may be turned from right to left",
        "output_stream.py",
        "\\u2028-\\u202e",
        "\\u2028-\\u2029",
        OUTPUT,
    ),
    Fault(
        "a stranger's words may be of any length",
        "output_stream.py",
        'return words if len(words) <= length else words[: length - 3] + "..."',
        "return words",
        OUTPUT,
    ),
    Fault(
        "a secret with an invisible letter in it is sent",
        "redaction.py",
        '    text = INVISIBLE.sub("", text)\n',
        "",
        SECRETS,
    ),
    Fault(
        "the Hub's stored tokens are not known",
        "redaction.py",
        "named | set(_stored_tokens())",
        "named",
        SECRETS,
    ),
    Fault(
        "a secret's value is shown in a recipe's line",
        "redaction.py",
        "match[1] + _covered(match[2])",
        "match[0]",
        "recipe/test_secrets_in_recipes.py",
    ),
    Fault(
        "links out of a run's folder are sent",
        "hub/upload_files.py",
        "    if out:\n",
        "    if False:\n",
        f"{CORPUS} -k secrets-link",
    ),
    Fault(
        "a header of weights is sent unsearched",
        "hub/upload_files.py",
        'if self.path.endswith(".png"):',
        'if self.path.endswith((".png", ".safetensors")):',
        "hub/test_push.py -k header_of_the_weights",
    ),
    Fault(
        "names of somebody's home are sent",
        "hub/upload_files.py",
        "(home := SOMEBODYS_HOME.search(text)) is not None:",
        "(home := None) is not None:",
        "hub/test_push.py -k TestSecrets",
    ),
)

FAULTS_OF_STRANGERS = OF_MODELS + OF_PROGRAMS + OF_ROWS_AND_WORDS
