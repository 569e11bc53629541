"""Changes of a JSON value, of a text in lines and of bytes, each drawn at random from a seeded generator."""

from __future__ import annotations

import copy
import gzip
import json
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any


class Raw(str):
    """Text that stands in a JSON file as it is: what no Python value is written as."""


HOSTILE_TEXTS = (
    "", " ", "0", "-1", "a", "null", "true", "nan", "none", "auto", "../x", "/etc/passwd", "~", "-x", "a\x00b",
    "\x1b[2J\x1b]0;a\x07", "\u202egnp.exe", "\u2028", "a\nb", "\ufeff", "\ud800", "a" * 5_000, "(a+)+$", "{{ 1/0 }}",
    "%s%n", "{0}", "$(touch x)", "x.bin", "model.safetensors", "<|im_end|>", "\U0001f600", "é", "__class__", "F32",
    "1e5",
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**63, -(2**63), 2**64, 0.5, -0.5, 1e308, 5e-324, [], {}, [[]],
    [None], {"": 0}, {"a": {"b": [1, "c"]}}, [0, 0], [-1], ["a", "a"],
    Raw("NaN"), Raw("-Infinity"), Raw("1e400"), Raw("-0"), Raw("-0.0"), Raw("9" * 400), Raw("1" * 5_000), Raw("1E+2"),
    Raw("[" * 70 + "]" * 70), Raw("[" * 3_000 + "]" * 3_000), Raw('{"a":' * 100 + "1" + "}" * 100),
    Raw('{"a":1,"a":2}'), Raw("[" + "0," * 20_000 + "0]"), Raw('"\\ud800"'), Raw('"\\u0000"'), Raw("nul"),
    Raw("'a'"), Raw(""), Raw("01"),
)  # fmt: skip
FAMILIAR = (*HOSTILE_TEXTS, *HOSTILE)
MOST_LETTERS = 2**22  # of a file


def dumped(value: Any) -> str:
    """As JSON, with what is Raw as it is; half letters are escaped, as a file in UTF-8 cannot hold them.

    Without recursion: values may be nested deeper than Python calls. Cut off where it is long enough: a list that is
    repeated a thousand times, in one that is repeated two hundred times, would fill the memory.
    """
    parts, left, length = list[str](), [value], 0
    while left and length < MOST_LETTERS:
        each = left.pop()
        if isinstance(each, dict):
            inside = [[Raw(f"{_leaf(str(key))}: "), item] for key, item in each.items()]
            left += reversed(_joined("{", inside, "}"))
        elif isinstance(each, list):
            left += reversed(_joined("[", [[item] for item in each], "]"))
        else:
            parts.append(str(each) if isinstance(each, Raw) else _leaf(each))
            length += len(parts[-1])
    return "".join(parts)


def _leaf(value: Any) -> str:
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())


def _joined(begin: str, items: list[list[Any]], end: str) -> list[Any]:
    between = [piece for item in items for piece in (Raw(", "), *item)][1:]
    return [Raw(begin), *between, Raw(end)]


def changed(draw: Random, value: Any, times: int = 1) -> Any:
    """A copy of a JSON value with so many changes, each at a place of any depth."""
    holder = {"": copy.deepcopy(value)}
    for _ in range(times):
        place, key = _place(draw, holder)
        _change_at(draw, place, key, holder)
    return holder[""]


def _place(draw: Random, holder: dict[str, Any]) -> tuple[Any, Any]:
    """(container, key) of a value: from the root down, at each level one of its children, all as likely."""
    place: Any = holder
    key: Any = ""
    while isinstance(inner := place[key], dict | list) and inner and (draw.random() < 0.75 or place is holder):
        place, key = inner, draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    return place, key


def _change_at(draw: Random, place: Any, key: Any, holder: dict[str, Any]) -> None:
    value = place[key]
    kinds: list[Callable[[], Any]] = [lambda: draw.choice(HOSTILE), lambda: draw.choice(FAMILIAR)]
    kinds += [lambda: _near(draw, value)] * 3 + [lambda: [value], lambda: {"a": value}]
    kinds += [lambda: _elsewhere(draw, holder)]
    if place is not holder and draw.random() < 0.4:
        _change_keys(draw, place, key)
        return
    # A copy: what is hostile stays as it is, and nothing comes to hold itself.
    place[key] = copy.deepcopy(draw.choice(kinds)())


def _elsewhere(draw: Random, holder: dict[str, Any]) -> Any:
    place, key = _place(draw, holder)
    return place[key]


def _near(draw: Random, value: Any) -> Any:
    """A value like this one: of its kind, or as another kind is written."""
    if isinstance(value, Raw) or value is None:
        return draw.choice(FAMILIAR)
    if isinstance(value, bool):
        return draw.choice([not value, int(value), str(value)])
    if isinstance(value, int | float):
        return draw.choice([value + 1, value - 1, -value, value * 1000, value / 3, float(value), str(value), value * 2])
    if isinstance(value, str):
        at = draw.randint(0, len(value))
        added = draw.choice(HOSTILE_TEXTS)
        return draw.choice([value[:at] + added + value[at:], value[:at], value.upper(), value * 2, value[::-1]])
    items = list(value.items()) if isinstance(value, dict) else list(value)
    draw.shuffle(items)
    items = draw.choice([items[:-1], items[:1], items, []])
    return dict(items) if isinstance(value, dict) else draw.choice([items, items * 3, value * 200])


def _change_keys(draw: Random, place: Any, key: Any) -> None:
    """Of an object a key goes, has another name or is there twice; of a list an element goes or is repeated."""
    if isinstance(place, list):
        times = draw.choice([0, 0, 2, 3, 1_000])
        place[key : key + 1] = [place[key]] * times
        return
    value = place.pop(key)
    match draw.choice(["gone", "gone", "renamed", "twice", "added"]):
        case "renamed":
            place[draw.choice([*HOSTILE_TEXTS, key.upper(), key[:-1], f"{key}s"])] = value
        case "twice":  # the writer puts the text after a key as it is
            place[key] = Raw(f"{dumped(value)}, {dumped(key)}: {dumped(draw.choice([value, *HOSTILE]))}")
        case "added":
            place |= {key: value, draw.choice(HOSTILE_TEXTS): copy.deepcopy(draw.choice(FAMILIAR))}


BEGINNINGS = (
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"PK\x03\x04",
    b"\x1f\x8b",
    b"\x80\x04",
    b"<!DOCTYPE html>",
    b"\x00",
    b"\n\n",
)


def spoilt(draw: Random, content: bytes) -> bytes:
    """Bytes with one change that knows nothing of what they mean."""
    at, end = sorted(draw.randint(0, len(content)) for _ in range(2))
    near = min(end, at + draw.randint(0, 16))
    ways: list[Callable[[], bytes]] = [
        lambda: content[:at],
        lambda: content[:at] + content[near:],
        lambda: content[:near] + content[at:],
        lambda: content[:at] + draw.randbytes(draw.randint(1, 8)) + content[near:],
        lambda: content[:at] + bytes([content[at] ^ 1 << draw.randint(0, 7)]) + content[at + 1 :] if at < end else b"",
        lambda: draw.choice(BEGINNINGS) + content,
        lambda: content[:at] + draw.choice(HOSTILE_TEXTS).encode("utf-8", "replace") + content[at:],
        lambda: content[:at] + struct.pack("<q", draw.choice([-1, 0, 2**31, 2**62])) + content[at + 8 :],
        lambda: content.replace(b"\n", draw.choice([b"\r\n", b"\r", b"", b"\n\n"])),
        lambda: content.decode("utf-8", "replace").encode(draw.choice(["utf-16", "utf-32", "utf-16-le", "utf-8-sig"])),
        lambda: gzip.compress(content, mtime=0),
        lambda: content[:at] + content[at:end] * 20 + content[end:],
    ]
    return draw.choice(ways)()


YAML_VALUES = (
    "", "null", "~", "yes", "off", "0", "-1", "1", "2", "0x10", "0o7", "1_000", "1e3", "3e-4", ".inf", "-.inf",
    ".nan", "1e400", "-0.0", "9223372036854775808", "9" * 400, "2001-01-01", "12:30:45", "'", '"', '"\\x1b[2J"',
    '"\\ud800"', "[", "]", "{}", "{a: 1}", "[1, a]", "[[]]", "&a [*a]", "*a", "&a 1", "<<",
    "!!python/object/apply:os.system [id]", "!!binary aGk=",
    "!!set {a}", "!!float x", "!!int x", "!!timestamp x", "!!null x", "!x 1", "|", ">", "- 1", "? a", "%YAML 1.1",
    "---", "...", "@a", "`a`", "a: b", "a #b", "\t1", "\x07", "\u202ea", "a" * 5_000, "hf_" + "a" * 34, "../../x",
    "/dev/zero", "~/x", "-x", "[" * 200 + "]" * 200, "(a+)+b", "1.0", "1.5", "0.3", "true", "auto", "all-linear",
    "\xa0", "\ufeff", "x\ty", "1,5", "50%",
)  # fmt: skip


def changed_yaml(draw: Random, text: str) -> str:
    """A YAML page with one change of a line, a value, a key, an indentation."""
    lines = text.split("\n")
    written = [index for index, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    at = draw.choice(written or [0])
    line = lines[at]
    name, colon, _ = line.partition(":")
    spaces = line[: len(line) - len(line.lstrip())]
    value = draw.choice(YAML_VALUES)
    ways: list[list[str]] = [
        *[[f"{name}{colon or ':'} {value}"]] * 8,
        [f"{name}:", f"{spaces}  {value}"],
        [],
        [line, line],
        [line, f"{spaces}{draw.choice(list(_keys_of(text)))}: {value}"],
        [line, f"{spaces}{draw.choice(HOSTILE_TEXTS).strip() or 'q'}: {value}"],
        [f" {line}"],
        [line.lstrip()],
        [f"\t{line}"],
        [line, f"{spaces}  - {value}"],
        [line, f"{spaces}<<: {value}"],
        [line.upper()],
        [line.replace(name.strip(), name.strip()[:-1] or "q")],
        [line + draw.choice(["\x00", "\x85", "\u2029", " ", "\t", "\r", "\x1b[1m", "'", ":", "]"])],
        [value],
    ]
    lines[at : at + 1] = draw.choice(ways)
    return "\n".join(lines)


def _keys_of(text: str) -> Iterator[str]:
    yield "seed"
    for line in text.split("\n"):
        if ":" in line and not line.lstrip().startswith("#"):
            yield line.partition(":")[0].strip(" -")
