"""YAML text to plain values, each with its place; strict where YAML is lenient.

YAML 1.1 reads `1e-4` as text, `no` as false, `010` as eight, lets a later key overwrite an earlier one and a page of
aliases unfold into gigabytes. Here numbers are numbers, only true and false are truth values, the rest is text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from finetune.output_stream import printable
from finetune.redaction import hide_secrets, known_secrets

MAX_BYTES = 2**20
MAX_YAML_DEPTH = 20
MAX_NODES = 20_000  # counted after aliases are unfolded

Path = tuple[str | int, ...]
STANDARD = "tag:yaml.org,2002:"
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
INTEGER = re.compile(r"[-+]?(0|[1-9][\d_]*)")
LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # as PyYAML counts lines
SHOWN_COLUMNS = 100  # shown of a source line
# PyYAML's message -> problem and remedy, for common mistakes.
PLAIN_WORDS = {
    "'\\t'": "a tab cannot indent in YAML; use spaces",
    "mapping values are not allowed here": "a second `key:` in one line; begin a new line, or quote the value",
    "expected the node content": "a value is missing, or a bracket is not closed; complete it",
    "expected <block end>": "the indentation does not fit the lines above; begin the keys of a section in one column",
    "cannot start any token": "a value cannot begin with this character; put the value in quotes",
    "found undefined alias": "an alias (*name) without its anchor (&name); write the value out",
    "unknown escape character": "this backslash means nothing in double quotes; use single quotes, or write two",
}
# More of these. Their mistakes are shown where the bracket or quote was opened.
OPENED_WORDS = {
    "could not find expected ':'": "this line is not `key: value`; add the colon and a space",
    "expected ',' or ']'": "this bracket is not closed, or a comma or quotes are missing inside; complete it, add ]",
    "expected ',' or '}'": "this bracket is not closed, or a comma or quotes are missing inside; complete it, add }",
    "unexpected end of stream": "a quote opened here is never closed; close it",
}


@dataclass(frozen=True)
class Place:
    """Line and column, from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Flaw:
    """Something wrong with the text itself."""

    place: Place
    key: str
    problem: str
    unreadable: Path | None = None  # the value that cannot be read; other mistakes in it follow from this one


@dataclass
class Parsed:
    """A text's value, and the places of its keys and values."""

    value: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)
    nodes: int = 0
    too_far: Place | None = None  # where aliases unfolded into too many values


class _Exceeds(Exception):
    """The text exceeds a limit."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.problem)
        self.flaw = flaw


class _Loader(yaml.SafeLoader):
    """Every plain scalar is text at first; `_scalar` decides. Limits are checked as the text is read."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth, self.documents, self.node_events = 0, 0, 0

    def get_event(self) -> Any:
        """The next event. Raises _Exceeds for too much depth, too many values, or a second document."""
        event: Any = super().get_event()  # type: ignore[no-untyped-call]
        place = _place(event.start_mark)
        # A bomb of aliases has few events; `_value` counts what it unfolds into.
        self.node_events += isinstance(event, yaml.NodeEvent)
        if self.node_events > 2 * MAX_NODES:  # keys count here too
            raise _Exceeds(Flaw(place, "", f"holds more than {MAX_NODES:,} values; a recipe is a page"))
        self.documents += isinstance(event, yaml.DocumentStartEvent)
        self.depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if self.depth > MAX_YAML_DEPTH:
            raise _Exceeds(Flaw(place, "", f"is nested deeper than {MAX_YAML_DEPTH} levels; flatten it"))
        if self.documents > 1:
            raise _Exceeds(Flaw(place, "", "a second document begins here; a recipe is one document"))
        return event


def parse(text: str) -> Parsed:
    """Read one YAML document. Each mistake is a flaw; the rest is still read."""
    parsed = Parsed()
    try:
        node = yaml.compose(text, Loader=_Loader)
    except _Exceeds as error:
        parsed.flaws.append(error.flaw)
        return parsed
    except yaml.MarkedYAMLError as error:
        parsed.flaws.append(_syntax(text, error))
        return parsed
    except yaml.reader.ReaderError as error:
        before = LINE_END.split(text[: error.position])
        place = Place(len(before), len(before[-1]) + 1)
        problem = "holds a character that YAML does not allow; remove it"
        if "\udc80" <= text[error.position] <= "\udcff":  # Python's mark for a byte that it could not read as a letter
            problem = "holds a letter that this shell's LC_ALL or LANG cannot say; unset it, or set PYTHONUTF8=1"
        parsed.flaws.append(Flaw(place, "", problem))
        return parsed
    if node is not None:
        parsed.value = _value(node, (), parsed)
    if parsed.too_far:
        problem = f"aliases unfold into more than {MAX_NODES:,} values, or into themselves; write the values out"
        return Parsed(flaws=[Flaw(parsed.too_far, "", problem)])
    return parsed


def yaml_value(text: str) -> Any:
    """The value of a YAML 1.1 file, which other programs read too.

    Raises YAMLError, also instead of the half dozen other errors that PyYAML's tag constructors raise.
    """
    try:
        return yaml.safe_load(text)
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise yaml.YAMLError("a value is not of the kind that its tag names") from error
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def dotted(path: Path) -> str:
    """`data.train.0.path`."""
    return ".".join(map(str, path))


def _syntax(text: str, error: yaml.MarkedYAMLError) -> Flaw:
    """PyYAML's error in plain words, with its place."""
    place, line = Place(1, 1), ""
    if mark := error.problem_mark or error.context_mark:
        place = _place(mark)
    lines = LINE_END.split(text)
    if place.line <= len(lines):
        line = lines[place.line - 1]
    indent = len(line) - len(line.lstrip())
    if "\t" in line[:indent]:
        return Flaw(place, "", PLAIN_WORDS["'\\t'"])
    # PyYAML sees `b: 1` as a second `key:` if it continues the line above. Deeper below `a: 1`, it is indented wrongly.
    above = next((before for before in reversed(lines[: place.line - 1]) if before.strip()), "")
    deeper = indent > len(above) - len(above.lstrip()) and line.find(":") == place.column - 1
    if "mapping values" in str(error.problem) and deeper and not above.lstrip().startswith("#"):
        return Flaw(Place(place.line, indent + 1), "", PLAIN_WORDS["expected <block end>"])
    for words, meaning in PLAIN_WORDS.items():
        if words in str(error.problem):
            return Flaw(place, "", meaning)
    for words, meaning in OPENED_WORDS.items():
        if words in str(error.problem):
            if error.context_mark:
                place = _place(error.context_mark)
            return Flaw(place, "", meaning)
    reason = " ".join(filter(None, [error.context, error.problem]))
    return Flaw(place, "", f"this is not YAML: {reason}; check indentation, quotes and brackets")


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _value(node: yaml.Node, path: Path, parsed: Parsed) -> Any:
    parsed.nodes += 1
    parsed.values[path] = _place(node.start_mark)
    if parsed.nodes > MAX_NODES or len(path) > MAX_YAML_DEPTH:  # only an alias inside itself is deeper than its text
        parsed.too_far = parsed.too_far or parsed.values[path]
        return None
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, parsed)
    if isinstance(node, yaml.SequenceNode):
        _refuse_tag(node, "seq", path, parsed)
        return [_value(child, (*path, index), parsed) for index, child in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    _refuse_tag(node, "map", path, parsed)
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name, place = str(key_node.value), _place(key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):  # {a: b}: c, or [a]: b
            problem = "a key must be a word; write key: value, or put a value that begins with a bracket in quotes"
            parsed.flaws.append(Flaw(place, dotted(path), problem, path))
            continue
        inner_path = (*path, name)
        if name == "<<":
            parsed.flaws.append(Flaw(place, dotted(inner_path), "merge keys are not read; write the keys out"))
            continue
        if name in values:
            first = parsed.keys[inner_path].line
            problem = f"appears twice, first in line {first}; keep one of them"
            parsed.flaws.append(Flaw(place, dotted(inner_path), problem))
            continue
        parsed.keys[inner_path] = place
        values[name] = _value(value_node, inner_path, parsed)
    return values


def _refuse_tag(node: yaml.Node, standard: str, path: Path, parsed: Parsed) -> None:
    if node.tag != STANDARD + standard:
        problem = f"the tag {node.tag} is not read; write a plain value"
        parsed.flaws.append(Flaw(_place(node.start_mark), dotted(path), problem, path))


def _scalar(node: yaml.ScalarNode, path: Path, parsed: Parsed) -> Any:
    _refuse_tag(node, "str", path, parsed)
    # JSON writes a letter beyond 16 bits as two escapes. PyYAML does not join them.
    text = str(node.value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if "\0" in text or text.count("\N{REPLACEMENT CHARACTER}") > node.value.count("\N{REPLACEMENT CHARACTER}"):
        problem = "holds a character that no file name or text can hold; remove its escape"
        parsed.flaws.append(Flaw(_place(node.start_mark), dotted(path), problem, path))
    return text if node.style else plain_scalar(text)


def plain_scalar(text: str) -> Any:
    """The value of an unquoted word: null, a truth value, a number, else text."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text.lower() in ("true", "false") and text in (text.lower(), text.upper(), text.capitalize()):
        return text.lower() == "true"
    if INTEGER.fullmatch(text):
        digits = text.replace("_", "")
        if len(digits) < 20:  # int() refuses thousands of digits
            return int(digits)
        return float(digits)
    if FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0\d+", text):  # 010 stays text: number_trap explains it
        return float(text.replace("_", ""))
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text):
        return float(text.replace(".", ""))
    return text


def number_trap(text: str) -> str | None:
    """The text to write instead of a number that YAML 1.1, or a person, spells differently; None for other text."""
    plain = text.replace("_", "")
    if isinstance(plain_scalar(text), (int, float)):
        return "remove the quotes"
    if re.fullmatch(r"[-+]?0\d+", plain):  # 010, which YAML 1.1 reads as 8
        return f"a leading zero may mean octal, write {int(plain)}"
    if re.fullmatch(r"\d{1,3}(,\d{3})+", plain):  # 10,000
        return f"write {plain.replace(',', '')}"
    if re.fullmatch(r"\d{1,9}(\.\d+)?\s*%", plain):  # 5 %
        return f"write {float(plain.rstrip('% ')) / 100:g}"
    if re.fullmatch(r"\d{1,9}[kKmM]", plain):  # 2k
        factor = {"k": 1_000, "m": 1_000_000}[plain[-1].lower()]
        return f"write {int(plain[:-1]) * factor}"
    return None


def shown(value: Any) -> str:
    """A value as YAML would show it, short. Secrets are hidden before it is shortened, while they can be recognised."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    text = hide_secrets(printable(str(value)), known_secrets())
    if not text.strip():
        return f'"{text}"'
    return shorten(text, 40)


def shorten(text: str, length: int, ellipsis: str = "...") -> str:
    """The text, or its beginning and an ellipsis, `length` characters in all."""
    if len(text) <= length:
        return text
    return text[: length - len(ellipsis)] + ellipsis


def excerpt(text: str, place: Place) -> Iterator[str]:
    """The source line and a caret under the place. A long line is cut on both sides of it."""
    lines = LINE_END.split(text)
    if not 0 < place.line <= len(lines) or not lines[place.line - 1].strip():
        return
    line, column, start = printable(lines[place.line - 1].replace("\t", " ")), place.column - 1, 0
    if len(line) > SHOWN_COLUMNS:
        start = max(0, column - SHOWN_COLUMNS // 2)
    before, after = line[start:column], line[column : start + SHOWN_COLUMNS]
    if start:
        before = "..." + before
    if len(line) > start + SHOWN_COLUMNS:
        after += "..."
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in before)  # these take two columns
    yield f"    {before}{after}".rstrip()
    yield f"    {' ' * (len(before) + wide)}^"
