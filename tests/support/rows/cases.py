"""Small cases of one kind in one YAML file: a name, and what the case is. `FILE.yaml::NAME` is one of them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has it


@cache
def cases_in(file: Path) -> dict[str, Any]:
    """Name -> case, in the file's order. A name that stands twice is refused: YAML would drop the first case."""
    loader = _Loader(file.read_text("utf-8"))
    node = loader.get_single_node()
    names = Counter(name.value for name, _ in node.value)
    twice = [name for name, count in names.items() if count > 1]
    assert not twice, f"{file}: more than one case is named {', '.join(twice)}"
    return dict(loader.construct_document(node))


def case_named(place: str) -> Any:
    """The case at `FILE.yaml::NAME`, or the whole of a file that holds one case."""
    file, _, name = place.partition("::")
    cases = cases_in(Path(file))
    return cases[name] if name else cases
