"""The parts of strangers' files that run: a chat template, a tokenizer's patterns, patterns for a model's layers.

Each runs in a child process first, with limits on time and memory. A computation that ended within them is trusted from
then on, by its hash: an empty file in the cache folder's `trusted/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import cache_folder
from finetune.library_errors import library_errors
from finetune.output_stream import one_line
from finetune.paths import open_regular
from finetune.untrusted.json_files import unreadable
from finetune.wording import counted

WALL_SECONDS = 120  # of a child that neither computes nor ends, on a machine where many wait for the processor
TRUST = 1  # part of each hash: raise it when a limit or a program changes
# Limits are set when the child's own imports are done, in addition to what they took. Cores of it are not dumped.
_PRELUDE = """
import json, math, os, resource, sys
asked = json.loads(sys.stdin.read())
sys.path[:] = asked.pop("sys.path")
def limit():
    pages = int(open("/proc/self/statm").read().split()[0])
    memory = pages * os.sysconf("SC_PAGE_SIZE") + asked["mebibytes"] * 2**20
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime) + asked["seconds"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
def answer(word):
    print(word)
    sys.stdout.flush()
    os._exit(0)
"""
_found_here: dict[str, str | None] = {}  # in this process, also what was refused


def refused(
    kind: str, program: str, inputs: dict[str, Any], *, seconds: int, mebibytes: int, known_by: str = ""
) -> str | None:
    """Run a program once on its input. None if it ends within its limits, else the reason for the refusal.

    Args:
        kind: The kind of input; part of the hash.
        program: Python that calls `limit()` after its imports, and `answer(word)`: "ok", or the reason for a refusal.
            "ok" makes the input trusted. If the program cannot run at all (no /proc, no such library), nothing is
            refused.
        inputs: The input, as JSON, which the program finds in `asked`.
        known_by: The key that it is trusted by, instead of `inputs`: a file's own hash.
    """
    content = json.dumps([TRUST, kind, program, known_by or inputs, seconds, mebibytes])
    key = hashlib.sha256(content.encode()).hexdigest()
    if key not in _found_here:
        _found_here[key] = None if is_trusted(key) else _tried(key, program, inputs, seconds, mebibytes)
    return _found_here[key]


def _tried(key: str, program: str, inputs: dict[str, Any], seconds: int, mebibytes: int) -> str | None:
    request = {**inputs, "seconds": seconds, "mebibytes": mebibytes, "sys.path": sys.path}
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-c", _PRELUDE + program],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WALL_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"does not end within {WALL_SECONDS} seconds"
    word = process.stdout.strip().splitlines()[-1:] or [""]
    if process.returncode == 0 and word[0] == "ok":
        trust(key)
        return None
    return one_line(word[0]) or _ended(process, seconds, mebibytes)


def _ended(process: subprocess.CompletedProcess[str], seconds: int, mebibytes: int) -> str | None:
    """Why a child ended without an answer; None where its own program could not run."""
    if process.returncode in (-9, -24):  # SIGKILL and SIGXCPU, which the limit on time sends
        return f"does not end within {counted(seconds, 'second')}"
    if process.returncode < 0 or "MemoryError" in process.stderr or "memory allocation" in process.stderr:
        return f"needs more than {mebibytes:,} MiB, or breaks the library that reads it"
    return None


def is_trusted(key: str) -> bool:
    """Whether `trust` was called for this hash, by any process of the user."""
    return _file(key).exists()


def trust(key: str) -> None:
    """Remember that the input with this hash may run."""
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        _file(key).touch()
    except OSError:  # a cache that cannot be written: the next process looks again
        return


def _file(key: str) -> Path:
    return cache_folder() / "trusted" / key


TEMPLATE_SECONDS, TEMPLATE_MEBIBYTES = 1, 256
# The environment of transformers 5.24 (utils/chat_template_utils.py). Errors that a template raises are ignored here.
_TEMPLATE = """
from contextlib import suppress
import jinja2, jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
class Generation(jinja2.ext.Extension):
    tags = {"generation"}
    def parse(self, parser):
        line = next(parser.stream).lineno
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)
def stop(message): raise jinja2.TemplateError(message)
environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
environment.filters["tojson"] = lambda x, indent=None, **more: json.dumps(x, ensure_ascii=False, indent=indent)
environment.globals |= {"raise_exception": stop, "strftime_now": lambda form: "26 Jul 2024"}
limit()
try:
    try:
        template = environment.from_string(asked["template"])
    except RecursionError:
        answer("is nested too deeply to be compiled")
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {
        "type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}}
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer " * 20}]
    for chat in (turns[:1], turns, [{"role": "system", "content": "s"}, *turns * 16]):
        for tools in (None, [tool]):
            for prompt in (False, True):
                with suppress(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError,
                              ArithmeticError, RecursionError, AssertionError):
                    template.render(messages=chat, tools=tools, documents=None, add_generation_prompt=prompt,
                                    bos_token="<s>", eos_token="</s>", date_string="26 Jul 2024")
except MemoryError:
    answer(f"needs more than {asked['mebibytes']} MiB")
except jinja2.TemplateError:
    pass
answer("ok")
"""


def template_problem(source: str) -> str | None:
    """Why a chat template is refused; None if it ends within its limits on small chats."""
    if "{" not in source:
        return None
    inputs, seconds = {"template": source}, TEMPLATE_SECONDS
    return refused("template", _TEMPLATE, inputs, seconds=seconds, mebibytes=TEMPLATE_MEBIBYTES)


# Gemma 3's file of 33 MB takes 4 s and 0.6 GiB.
TOKENIZER_SECONDS, TOKENIZER_MEBIBYTES = 20, 6_144
MOST_TOKENIZER = 512 * 2**20
_TOKENIZER = """
from tokenizers import Tokenizer
limit()
texts = ["a", "Hello, world!  How are you?\\n\\n1234567890 times", "a" * 400, " " * 400, "1" * 400, "\\n \\n" * 100,
         "ab " * 130, "!" * 400, "\\u00e9\\u4e2d" * 100, "a1 " * 50 + "<|x|>" * 20]
try:
    tokenizer = Tokenizer.from_file(asked["path"])
    for text in texts:
        try:
            tokenizer.decode(tokenizer.encode(text).ids)
        except MemoryError:
            raise
        except Exception:  # letters that it does not know are a row's mistake
            continue
    for token in json.load(open(asked["path"], encoding="utf-8")).get("added_tokens") or []:
        if not all(key.isprintable() for key in token):  # a library prints unknown keys unchanged
            answer("has an added token with a key that no program writes")
except MemoryError:
    answer(f"needs more than {asked['mebibytes']} MiB")
except BaseException as error:  # a file that cannot be read; a panic
    words = " ".join(str(error).split())[:160]
    answer(f"cannot be used: {words or type(error).__name__}")
answer("ok")
"""


def look_at_tokenizer(folder: Path) -> None:
    """Read and use a folder's tokenizer.json, if any, in a child, once. Raises FinetuneError in one line."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    with library_errors(reading=path), open_regular(path) as file:
        if file.seek(0, 2) > MOST_TOKENIZER:
            raise unreadable(path, f"is larger than {MOST_TOKENIZER / 2**20:,.0f} MiB")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    inputs, seconds = {"path": str(path.resolve())}, TOKENIZER_SECONDS
    problem = refused("tokenizer", _TOKENIZER, inputs, known_by=digest, seconds=seconds, mebibytes=TOKENIZER_MEBIBYTES)
    if problem is not None:
        raise unreadable(path, f"the tokenizer {problem}")


PATTERN_SECONDS, PATTERN_MEBIBYTES = 1, 256
SIMPLE_QUANTIFIERS = 3  # without a quantified group they take at most n^3 steps for n letters
_PATTERNS = """
import re
limit()
for pattern in asked["patterns"]:
    try:
        found = re.compile(pattern)
        several = re.compile(rf"(.*\\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError):  # reported elsewhere, with its key
        continue
    for name in asked["names"]:
        found.fullmatch(name), several.match(name)
answer("ok")
"""


def refuse_slow_patterns(place: str, patterns: Collection[str], names: Iterable[str]) -> None:
    """Raise FinetuneError if matching the model's names against these patterns would not end.

    `place` begins the line: the recipe's key, or an adapter's file. Simple patterns are not tried.
    """
    doubtful = sorted({pattern for pattern in patterns if not is_simple(pattern)})
    if not doubtful:
        return
    # One layer's names are enough: the others differ by a number only.
    kinds = {re.sub(r"\d+", "0", name): name for name in names}
    inputs = {"patterns": doubtful, "names": sorted(kinds.values())}
    problem = refused("patterns", _PATTERNS, inputs, seconds=PATTERN_SECONDS, mebibytes=PATTERN_MEBIBYTES)
    if problem is not None:
        shown = one_line(doubtful[0], 60)
        raise FinetuneError(f"{place}: matching the model's names by {shown!r} {problem}; write a list of names")


def is_simple(pattern: str) -> bool:
    """Whether a pattern cannot take long: few repetitions, no repeated group, no back reference."""
    groups = re.search(r"\)[*+{?]|\\[1-9]|\(\?", pattern)
    return len(pattern) < 10_000 and groups is None and len(re.findall(r"[*+{]", pattern)) <= SIMPLE_QUANTIFIERS
