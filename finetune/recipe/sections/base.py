"""The base class for all recipe sections, and value types that several sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from finetune.paths import in_home

Local = Annotated[str, AfterValidator(in_home)]  # may be a path; ~ is the home folder
MOST = 2**31 - 1  # limit for every count; no run has more of anything
Count = Annotated[int, Field(ge=1, le=MOST)]
WholeNumber = Annotated[int, Field(ge=0, le=MOST)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
