"""YAML text to plain values, each with its place; strict where YAML is kind.

YAML 1.1 reads `1e-4` as text, `no` as false, `010` as eight, lets a later key overwrite an earlier one and a page of
aliases unfold into gigabytes. Here numbers are numbers, only true and false are truth values, the rest is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_BYTES = 2**20
MAX_DEPTH = 20
MAX_NODES = 20_000  # after aliases are unfolded

Path = tuple[str | int, ...]
STANDARD = "tag:yaml.org,2002:"
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
INTEGER = re.compile(r"[-+]?(0|[1-9][\d_]*)")


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


@dataclass
class Parsed:
    """The value of a text, and where its keys and values stand."""

    value: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)
    nodes: int = 0
    unfolded_too_far: bool = False


class _Loader(yaml.SafeLoader):
    """Every plain scalar is text at first; `_scalar` decides."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


def parse(text: str) -> Parsed:
    """Read one YAML document. Whatever is wrong is a flaw; the rest is still read."""
    parsed = Parsed()
    try:
        flaw = _limits(text)
        if flaw:
            parsed.flaws.append(flaw)
            return parsed
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        parsed.flaws.append(_syntax(text, error))
        return parsed
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        parsed.flaws.append(Flaw(place, "", "holds a character that YAML does not allow; take it away"))
        return parsed
    if node is not None:
        parsed.value = _value(node, (), parsed)
    if parsed.unfolded_too_far:
        problem = f"unfolds into more than {MAX_NODES:,} values, or into itself; take the aliases away"
        parsed.flaws.append(Flaw(Place(1, 1), "", problem))
    return parsed


def dotted(path: Path) -> str:
    """`data.train.0.path`."""
    return ".".join(map(str, path))


def _limits(text: str) -> Flaw | None:
    """Depth and number of documents, found without building anything."""
    depth, documents = 0, 0
    for event in yaml.parse(text, Loader=_Loader):
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return Flaw(_place(event.start_mark), "", f"is nested deeper than {MAX_DEPTH} levels; flatten it")
        if documents > 1:
            return Flaw(_place(event.start_mark), "", "a second document begins here; a recipe is one document")
    return None


def _syntax(text: str, error: yaml.MarkedYAMLError) -> Flaw:
    mark = error.problem_mark or error.context_mark
    place = _place(mark) if mark else Place(1, 1)
    lines = text.splitlines()
    line = lines[place.line - 1] if place.line <= len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in str(error.problem):
        return Flaw(place, "", "a tab cannot indent in YAML; use spaces")
    reason = " ".join(filter(None, [error.context, error.problem]))
    return Flaw(place, "", f"this is not YAML: {reason}; check indentation, quotes and brackets")


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _value(node: yaml.Node, path: Path, parsed: Parsed) -> Any:
    parsed.nodes += 1
    parsed.values[path] = _place(node.start_mark)
    if parsed.nodes > MAX_NODES or len(path) > MAX_DEPTH:  # deeper than the text is only an alias of itself
        parsed.unfolded_too_far = True
        return None
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, parsed)
    if isinstance(node, yaml.SequenceNode):
        _refuse_tag(node, "seq", path, parsed)
        return [_value(child, (*path, index), parsed) for index, child in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, path, parsed)


def _mapping(node: yaml.MappingNode, path: Path, parsed: Parsed) -> dict[str, Any]:
    _refuse_tag(node, "map", path, parsed)
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name, place = str(key_node.value), _place(key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):
            parsed.flaws.append(Flaw(place, dotted(path), "a key must be a word; write key: value"))
            continue
        here = (*path, name)
        if name == "<<":
            parsed.flaws.append(Flaw(place, dotted(here), "merge keys are not read; write the keys out"))
            continue
        if name in found:
            first = parsed.keys[here].line
            problem = f"stands twice, first in line {first}; keep one of them"
            parsed.flaws.append(Flaw(place, dotted(here), problem))
            continue
        parsed.keys[here] = place
        found[name] = _value(value_node, here, parsed)
    return found


def _refuse_tag(node: yaml.Node, standard: str, path: Path, parsed: Parsed) -> None:
    if node.tag != STANDARD + standard:
        problem = f"the tag {node.tag} is not read; write a plain value"
        parsed.flaws.append(Flaw(_place(node.start_mark), dotted(path), problem))


def _scalar(node: yaml.ScalarNode, path: Path, parsed: Parsed) -> Any:
    _refuse_tag(node, "str", path, parsed)
    return node.value if node.style else plain_scalar(node.value)


def plain_scalar(text: str) -> Any:
    """The value of an unquoted word: null, a truth value, a number, else text."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text.lower() in ("true", "false") and text in (text.lower(), text.upper(), text.capitalize()):
        return text.lower() == "true"
    if INTEGER.fullmatch(text):
        digits = text.replace("_", "")
        return int(digits) if len(digits) < 20 else float(digits)
    if FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0\d+", text):
        return float(text.replace("_", ""))
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text):
        return float(text.replace(".", ""))
    return text


def excerpt(text: str, place: Place) -> Iterator[str]:
    """The source line and a caret under the place."""
    lines = text.splitlines()
    if 0 < place.line <= len(lines):
        line = lines[place.line - 1].replace("\t", " ")[:160]
        yield f"    {line}"
        yield f"    {' ' * min(place.column - 1, 160)}^"
