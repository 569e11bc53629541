"""Why a key of another tool is not in the recipe: left_out.csv for the keys that are known; others count as unknown.

Each line of the table is a key with the tool whose configurations have it (transformers: its TrainingArguments, which
others take over; several: more than one tool; older: only former versions). `*` matches letters, digits and
underscores, `.*` at the end for everything below a section. The order of lines means nothing: of those that match, the
one with the most characters besides its stars decides.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from typing import NamedTuple, cast

from finetune.importers.foreign_config import Level
from finetune.paths import PACKAGE
from finetune.recipe.foreign_keys import REPLACED

TABLE = PACKAGE / "importers" / "left_out.csv"
UNKNOWN = "nothing here corresponds to it"
_NONE_AT_0 = ("label_smoothing_factor", "neftune_noise_alpha", "freeze_trainable_layers")


class KnownKey(NamedTuple):
    """A line of the table."""

    tool: str
    key: str
    level: Level
    reason: str

    def matches(self, key: str) -> bool:
        """Whether a dotted key is this one, or one that its stars cover."""
        if "*" not in self.key:
            return self.key == key
        pattern = re.escape(self.key.removesuffix(".*")).replace(r"\*", r"\w*")
        below = r"\..*" if self.key.endswith(".*") else ""
        return re.fullmatch(pattern + below, key) is not None


@cache
def known_keys() -> tuple[KnownKey, ...]:
    """The table, the most specific keys first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    keys = [KnownKey(tool, key, cast(Level, level), reason) for tool, key, level, reason in rows]
    return tuple(sorted(keys, key=lambda known: -len(known.key.replace("*", ""))))


def reason_for(key: str, value: object) -> tuple[Level, str]:
    """Why this key is left out. An unknown key counts as a change to the training, unless its value is false.

    A switch that is off changes nothing, even if the key would change the training. Inside a section false is a value.
    """
    for known in known_keys():
        if known.matches(key):
            off = (value is False and "." not in key) or (value == 0 and key in _NONE_AT_0)
            return ("same", "is off there too") if off and known.level == "differs" else (known.level, known.reason)
    if key in REPLACED:
        return "look", REPLACED[key].removesuffix("; remove the key")
    return "look" if value is False else "differs", UNKNOWN
