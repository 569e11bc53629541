"""What may be shown to strangers: no token, no user's or machine's name, no home folder."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.secret_scan import hide_secrets, known_secrets

_PLAIN = re.compile(r"[\w.,:=+-]{1,40}")  # of a variable: a number, a switch, a list of devices


def showable(value: Any) -> Any:
    """Texts, lists and mappings of texts with everything private replaced; what is no text as it is."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {key: showable(inner) for key, inner in value.items()}
    return [showable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _text(text: str) -> str:
    text = hide_secrets(text, known_secrets())
    homes = {str(Path.home()), os.path.realpath(Path.home()), os.environ.get("HOME", "")} - {"", "/"}
    for home in sorted(homes, key=len, reverse=True):
        text = text.replace(home, "~")
    text = re.sub(r"(?<![\w~])/(home|Users)/[^/\s:'\"]+", "~", text)
    for name, shown in ((_user(), "USER"), (socket.gethostname(), "HOST")):
        if len(name) > 1:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return ""


def variables(pattern: str) -> dict[str, str]:
    """The environment's variables of these names; values that are not a plain word or number are only `set`."""
    found = {name: value for name, value in sorted(os.environ.items()) if re.fullmatch(pattern, name)}
    return {name: showable(value) if _PLAIN.fullmatch(value) else "set" for name, value in found.items()}
