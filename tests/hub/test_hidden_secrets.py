"""A secret is found in every file that a push would send, however it is written there, and is not printed."""

from __future__ import annotations

import base64
import importlib.util
import struct
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.errors import FinetuneError
from finetune.hub.upload_files import _WINDOW, Outgoing, check_no_secrets
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
    "template in UTF-16": (TEMPLATE, f"{{# {TOKEN} #}}".encode("utf-16")),
    "template in UTF-16, no mark": (TEMPLATE, f"{{# {TOKEN} #}}".encode("utf-16-be")),
    "template in UTF-32": (TEMPLATE, f"{{# {OWN} #}}".encode("utf-32")),
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
    "picture, packed text": ("loss.png", png((b"zTXt", b"Comment\0\0" + zlib.compress(TOKEN.encode())))),
    "picture, packed Unicode": ("loss.png", png((b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(OWN.encode())))),
    "picture, another chunk": ("memory.png", png((b"eXIf", TOKEN.encode()))),
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


@pytest.mark.sample(4)
@pytest.mark.parametrize("secret", [TOKEN, OWN, "sk-" + "x1" * 12, "AKIA" + "ABCDEFGH12345678"])
@pytest.mark.parametrize("at", [1, 1_001, _WINDOW - 10, _WINDOW + 5])
def test_a_secret_in_a_tensors_bytes_is_found(secret: str, at: int, tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (_WINDOW + 2_000,), dtype=torch.uint8)
    word = torch.frombuffer(bytearray(b"\0" + secret.encode() + b"\0"), dtype=torch.uint8)
    raw[at - 1 : at - 1 + len(word)] = word
    save_file({"w": raw}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(FinetuneError, match="among the bytes of its tensors"):
        check_no_secrets([Outgoing("adapter_model.safetensors", tmp_path / "adapter_model.safetensors")], [OWN])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_weights_hold_no_secret(dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = torch.randn(2**22) * 0.02 if dtype.is_floating_point else torch.randint(0, 256, (2**22,))
    save_file({"w": numbers.to(dtype)}, tmp_path / "model.safetensors")
    check_no_secrets([Outgoing("model.safetensors", tmp_path / "model.safetensors")], [OWN])


def test_what_is_usually_sent_holds_no_secret(tmp_path: Path) -> None:
    """A tokenizer, the templates that TRL ships, a picture and a page."""
    tiny_tokenizer().save_pretrained(tmp_path)
    files = [Outgoing(path.name, path.read_bytes()) for path in tmp_path.iterdir()]
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    templates = sorted(Path(found.origin).parent.glob("chat_templates/*.jinja"))
    assert templates
    files += [Outgoing(f"additional_chat_templates/{path.name}", path.read_bytes()) for path in templates]
    page = f"<img src='data:image/png;base64,{base64.b64encode(png() * 1000).decode()}'>"
    files += [Outgoing("loss.png", png((b"tEXt", b"Software\0Matplotlib"))), Outgoing("report.html", page.encode())]
    check_no_secrets(files, [OWN])
