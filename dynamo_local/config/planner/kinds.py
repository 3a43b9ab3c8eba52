"""Kinds of values that options of planners have."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from dynamo_local.core.durations import SECONDS_MAX

Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)]
Hours = Annotated[float, Field(gt=0, le=SECONDS_MAX / 3600, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Threshold = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Percent = Annotated[int, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1)]
Gpus = Count

OPTIONS = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)
