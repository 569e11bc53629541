"""Faults in foreign text: rows of data, words for the terminal, secrets in what is sent.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

CORPUS = "corpus/test_corpus.py"
OUTPUT = "untrusted/test_output.py"
BAD_DATA = "data/test_bad_data.py"
SIZES = "data/test_unusual_sizes.py"
SECRETS = "test_redaction.py"

FAULTS_OF_FOREIGN_TEXT = (
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
        BAD_DATA,
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
