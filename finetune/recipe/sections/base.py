"""The base class for all recipe sections, and value types that several sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from finetune.paths import in_home

Local = Annotated[str, AfterValidator(in_home)]  # may be a path; ~ is the home folder
MOST = 2**31 - 1  # limit for every count; no run has more of anything
Count = Annotated[int, Field(ge=1, le=MOST)]
WholeNumber = Annotated[int, Field(ge=0, le=MOST)]
# Steps between two events. A number below 1 is a share of the run's T steps: ceil(T x share), as transformers counts.
Interval = Count | Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
