"""The base class for all recipe sections, and value types that several sections share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from finetune.paths import in_home

# May be a path; ~ is the home folder. A chat template may stand here itself.
Local = Annotated[str, AfterValidator(lambda text: text if "{" in text else in_home(text))]
MOST = 2**31 - 1  # limit for every count; no run has more of anything
Count = Annotated[int, Field(ge=1, le=MOST)]
WholeNumber = Annotated[int, Field(ge=0, le=MOST)]
# Steps between two events. A number below 1 is a share of the run's T steps: ceil(T x share), as transformers counts.
Interval = Count | Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class CrossCheck:
    """Values that contradict each other, or a name that cannot be used. `key` is the dotted path below its section."""

    key: str
    problem: str
    remedy: str


def refuse(checks: Iterable[CrossCheck]) -> None:
    """Raise one error with all of these; do nothing if there are none. mistakes.py finds their places."""
    if failed := list(checks):
        text = "; ".join(f"{check.key}: {check.problem}; {check.remedy}" for check in failed)
        raise PydanticCustomError("cross_check", "{text}", {"text": text, "found": failed})


def steps_between(interval: float, total_steps: float) -> int:
    """Steps from one evaluation, or checkpoint, to the next. A share is rounded up, as transformers does."""
    if interval < 1:
        return math.ceil(interval * total_steps)
    return int(interval)
