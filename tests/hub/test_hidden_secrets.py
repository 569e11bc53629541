"""A secret is found in every file that a push would send, however it is written there, and is not printed."""

from __future__ import annotations

import base64
import importlib.util
import struct
import zlib
from pathlib import Path

import pytest

from finetune.errors import FinetuneError
from finetune.hub.upload_files import Outgoing, check_no_secrets
from tests.support.models.tiny import tiny_tokenizer

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrSt"  # of no account
OWN = "correct-horse-battery-staple"  # a value that this machine knows
TEMPLATE = "additional_chat_templates/t.jinja"


def png(*chunks: tuple[bytes, bytes], tail: bytes = b"") -> bytes:
    """A picture of one pixel with these chunks before its pixels."""
    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    every = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(b"\0\0")), (b"IEND", b"")]
    packed = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in every
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed) + tail


def escaped(text: str, form: str) -> str:
    return "".join(form.format(ord(letter)) for letter in text)


BACKSLASH = chr(92)
CASES: dict[str, tuple[str, bytes]] = {
    "name": (f"additional_chat_templates/{TOKEN}.jinja", b"{{ messages }}"),
    "name, known": (f"additional_chat_templates/{OWN}.jinja", b"{{ messages }}"),
    "config, first letter": ("config.json", f'{{"a": "{BACKSLASH}u0068{TOKEN[1:]}"}}'.encode()),
    "config, every letter": ("config.json", f'{{"a": "{escaped(TOKEN, BACKSLASH + "u{:04X}")}"}}'.encode()),
    "template, every letter": (TEMPLATE, f"{{{{ '{escaped(TOKEN, BACKSLASH + 'x{:02x}')}' }}}}".encode()),
    "HTML, by numbers": ("report.html", escaped(TOKEN, "&#{};").encode()),
    "HTML, by hexadecimal numbers": ("report.html", escaped(OWN, "&#x{:x};").encode()),
    "an address": ("README.md", f"https://x/?t={escaped(TOKEN, '%{:02X}')}".encode()),
    "two lines": (TEMPLATE, f"{TOKEN[:12]}\n{TOKEN[12:]}".encode()),
    "two lines, indented": ("README.md", f"{TOKEN[:9]}\r\n   {TOKEN[9:]}".encode()),
    "two lines of a string": ("recipe.yaml", f'a: "{TOKEN[:12]}{BACKSLASH}\n    {TOKEN[12:]}"'.encode()),
    "two strings": (TEMPLATE, f"'{OWN[:8]}'\n  '{OWN[8:]}'".encode()),
    "picture, text": ("loss.png", png((b"tEXt", b"Comment\0" + TOKEN.encode()))),
    "picture, behind its end": ("memory.png", png(tail=TOKEN.encode())),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hidden_secret_is_found_and_not_printed(case: str) -> None:
    path, content = CASES[case]
    with pytest.raises(FinetuneError, match="nothing was pushed") as caught:
        check_no_secrets([Outgoing(path, content)], [OWN])
    said = str(caught.value)
    assert "revoke it" in said
    assert TOKEN not in said
    assert OWN not in said
    assert len(said.splitlines()) == 2


def test_what_is_usually_sent_holds_no_secret(tmp_path: Path) -> None:
    """A tokenizer, the templates that TRL ships, a picture and a page."""
    tiny_tokenizer().save_pretrained(tmp_path)
    files = [Outgoing(path.name, path.read_bytes()) for path in tmp_path.iterdir()]
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    templates = sorted(Path(found.origin).parent.glob("chat_templates/*.jinja"))
    if not templates:
        pytest.skip("the installed TRL ships no chat templates")
    files += [Outgoing(f"additional_chat_templates/{path.name}", path.read_bytes()) for path in templates]
    page = f"<img src='data:image/png;base64,{base64.b64encode(png() * 1000).decode()}'>"
    files += [Outgoing("loss.png", png((b"tEXt", b"Software\0Matplotlib"))), Outgoing("report.html", page.encode())]
    check_no_secrets(files, [OWN])
