"""HTML in the rows: a model that learns it writes it, and most places that show an answer show the tags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_TAG = re.compile(
    r"</?(br|p|div|span|strong|em|b|i|u|a|ul|ol|li|h[1-6]|table|tr|td|th|img|font|blockquote|hr)(?:\s[^<>]*)?/?>"
    r"|&(?:nbsp|amp|lt|gt|quot|#\d+);",
    re.IGNORECASE,
)
LEAST_WITH_HTML = 0.02  # of the rows; fewer are examples in a text about HTML
SHOWN_TAGS = 3


def html_note(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line that names the columns with HTML, if a fiftieth of the rows or more has some."""
    counts: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            found = [match[0].lower() for match in _TAG.finditer(value)] if isinstance(value, str) else []
            counts[name] += bool(found)
            tags.update(found)
    columns = {name: count for name, count in counts.items() if count >= max(2, LEAST_WITH_HTML * len(rows))}
    if not columns:
        return []
    told = ", ".join(f"{name} ({count:,} of {len(rows):,} rows)" for name, count in columns.items())
    shown = ", ".join(tag for tag, _ in tags.most_common(SHOWN_TAGS))
    return [
        f"HTML in {told}: {shown}; the model learns to write it. If answers are shown as plain text, replace it in the "
        "file first (<br> by a line break, &amp; by &)"
    ]
