"""What every section of a recipe is, and the kinds of values that several of them have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from finetune.paths import in_home

Local = Annotated[str, AfterValidator(in_home)]  # may be a path; ~ is the home folder
Count = Annotated[int, Field(ge=1)]
WholeNumber = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
