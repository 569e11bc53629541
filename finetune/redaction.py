"""Redaction: secrets, by value where this machine knows them and by pattern, and the names of user, host and home."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# No letter of a secret shows it: only the name before it does.
AWS_SECRET = r"(?i:aws_?secret_?(?:access_?)?key)[\"']?\s{0,5}[:=]\s{0,5}[\"']?[A-Za-z0-9/+=]{40}(?![A-Za-z0-9/+=])"
# Characters that nobody sees: within a secret they would hide it from every rule.
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]"
)
# Patterns of tokens, by their issuers' prefixes; long enough that no word of a tokenizer's vocabulary matches.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("a Hugging Face token", r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"),
    ("an API key", r"\bsk-[A-Za-z0-9_-]{20,}"),
    ("a GitLab token", r"\bgl(?:pat|dt|rt|ptt|soat|cbt|agent)-[A-Za-z0-9_-]{20,}"),
    ("a Stripe key", r"\b(?:sk|rk)_(?:live|test|prod)_[A-Za-z0-9]{10,}"),
    ("a JSON web token", r"\bey[A-Za-z0-9_-]{10,999}\.ey[A-Za-z0-9_-]{10,9999}\.[A-Za-z0-9_-]{10,}"),
    ("an AWS secret key", AWS_SECRET),
    ("a package registry's token", r"\b(?:npm_[A-Za-z0-9]{36}|pypi-AgE[A-Za-z0-9_-]{50,}|rubygems_[0-9a-f]{48})"),
    (
        "a cloud's token",
        r"\b(?:do[opr]_v1_[0-9a-f]{64}|ya29\.[A-Za-z0-9_-]{20,}|hv[sb]\.[A-Za-z0-9_-]{24,}|dckr_pat_[\w-]{20,})",
    ),
    (
        "a service's token",
        r"\b(?:SG\.[\w-]{16,99}\.[\w-]{16,}|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|glsa_\w{32,}|xapp-[\w-]{20,}"
        r"|(?:pplx|xai|nvapi|tvly)-[\w-]{20,}|(?:gsk|r8)_[A-Za-z0-9]{20,})",
    ),
    ("a GitHub token", r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})"),
    ("an AWS key", r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b"),
    ("a Slack token", r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    ("a Google key", r"\bAIza[0-9A-Za-z_-]{35}"),
    ("a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^-]+-----END [A-Z ]*PRIVATE KEY-----)?"),
    # Bounded, since a vocabulary may hold a hundred thousand letters without a space.
    ("a password in an address", r"\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@'\"<>]{1,100}:[^\s/@'\"<>]{1,100}@"),
)
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
# A value whose key names a secret, in YAML or JSON: hub_token: ..., but not max_new_tokens or pad_token: <pad>.
NAMED = re.compile(
    r"""(?<![A-Za-z])((?:token|secret|passw(?:or)?d|api[_-]?key|credentials?)["']?[ \t]*[:=][ \t]*)"""
    r"""("[^"\n]{8,}"|'[^'\n]{8,}'|[^\s,\[\]{}#"'<$][^\s,\]}]{7,})""",
    re.IGNORECASE,
)
MIN_LENGTH = 8  # letters of a variable's value to be taken for a secret: TOKENIZERS_PARALLELISM is "false"
HIDDEN = "[hidden]"


def known_secrets() -> frozenset[str]:
    """The values of this process's secret variables, and the Hub's tokens stored in the home folder."""
    named = {value for name, value in os.environ.items() if SECRET_NAMES.search(name) and not Path(value).is_absolute()}
    return frozenset(value for value in named | set(_stored_tokens()) if len(value) >= MIN_LENGTH)


def _stored_tokens() -> Iterable[str]:
    from huggingface_hub import constants

    for path in (constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The first file holds the token alone, the second lines `hf_token = ...` under names in brackets.
        yield from (line.rpartition("=")[2].strip() for line in text.splitlines() if not line.startswith("["))


def find_secret(text: str, known: Iterable[str]) -> tuple[int, str] | None:
    """Line number, from 1, and kind of the first secret in `text`; None where there is none. Never its value.

    Characters that nobody sees are passed over.
    """
    text = INVISIBLE.sub("", text)
    secrets = [(text.find(value), "a secret of this machine") for value in known if value in text]
    for kind, pattern in PATTERNS:
        match = re.search(pattern, text)
        secrets += [(match.start(), kind)] if match else []
    if not secrets:
        return None
    position, kind = min(secrets)
    return text.count("\n", 0, position) + 1, kind


def secret_key(value: Any, known: Iterable[str], key: str = "") -> tuple[str, str] | None:
    """Dotted key and kind of the first secret in a document with mappings and lists; None if there is none."""
    if isinstance(value, str):
        secret = find_secret(value, known)
        if secret:
            return (key, secret[1])
        return None
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    inner = (secret_key(entry, known, f"{key}.{name}" if key else str(name)) for name, entry in entries)
    return next(filter(None, inner), None)


def hide_secrets(text: str, known: Iterable[str]) -> str:
    """The text with every secret in it replaced, for messages that quote a server or a recipe."""
    return _hidden(text, known, lambda _: HIDDEN)


def cover_secrets(text: str, known: Iterable[str]) -> str:
    """A source text with every secret covered by as many letters, so that lines and columns stay as they are.

    The value of a key like `hub_token` is covered whatever it looks like.
    """
    return NAMED.sub(lambda match: match[1] + _covered(match[2]), _hidden(text, known, _covered))


def hide_in(value: Any, known: Iterable[str]) -> Any:
    """A document of mappings and lists with every secret in its texts replaced."""
    if isinstance(value, str):
        return hide_secrets(value, known)
    if isinstance(value, Mapping):
        return {hide_in(key, known): hide_in(entry, known) for key, entry in value.items()}
    if isinstance(value, list):
        return [hide_in(entry, known) for entry in value]
    return value


def _hidden(text: str, known: Iterable[str], instead: Callable[[str], str]) -> str:
    if INVISIBLE.search(text) and find_secret(text, known):
        # Invisible characters may lie inside a secret. They are hidden with it.
        places = [at for at, letter in enumerate(text) if not INVISIBLE.match(letter)]
        plain = "".join(text[at] for at in places)
        spans = [match.span() for value in known for match in re.finditer(re.escape(value), plain)]
        spans += [match.span() for _, pattern in PATTERNS for match in re.finditer(pattern, plain)]
        parts, copied = [], 0
        for first, last in sorted(spans):
            begin, end = places[first], places[last - 1] + 1
            if begin >= copied:
                parts += [text[copied:begin], instead(text[begin:end])]
                copied = end
        return "".join([*parts, text[copied:]])
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, instead(value))
    for _, pattern in PATTERNS:
        text = re.sub(pattern, lambda match: instead(match[0]), text)
    return text


def _covered(secret: str) -> str:
    return re.sub(r"[^\r\n\x85\u2028\u2029]+", lambda part: f"{HIDDEN:*<{len(part[0])}}"[: len(part[0])], secret)


_PLAIN = re.compile(r"[\w.,:=+-]{1,40}")  # a variable's value: a number, a switch, a list of devices


def redact(value: Any) -> Any:
    """A document with secrets and the names of user, host and home replaced in its texts; other values unchanged."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {key: redact(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(inner) for inner in value]
    return value


def _text(text: str) -> str:
    text = hide_secrets(text, known_secrets())
    homes = {str(Path.home()), os.path.realpath(Path.home()), os.environ.get("HOME", "")} - {"", "/"}
    for home in sorted(homes, key=len, reverse=True):
        text = text.replace(home, "~")
    text = re.sub(r"(?<![\w~])/(home|Users)/[^/\s:'\"]+", "~", text)
    for name, instead in ((_user(), "USER"), (socket.gethostname(), "HOST")):
        if len(name) > 1:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return ""


def variables(pattern: str) -> dict[str, str]:
    """Environment variables with matching names. A value that is not a plain word or number is shown as `set`."""
    matching = {name: value for name, value in sorted(os.environ.items()) if re.fullmatch(pattern, name)}
    return {name: redact(value) if _PLAIN.fullmatch(value) else "set" for name, value in matching.items()}
