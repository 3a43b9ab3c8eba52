"""Numbers on the command line. `nan` is within every range that click knows: it compares with nothing."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from dynamo_local.core.durations import SECONDS_MAX


class FiniteRange(click.FloatRange):
    """A `FloatRange` without `nan` and the infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error that names the option."""
        number = float(click.FLOAT.convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a number to go by.", param, ctx)
        return float(super().convert(number, param, ctx))


SECONDS = FiniteRange(min=0, min_open=True, max=SECONDS_MAX)
"""A duration: more than nothing, a year at most."""


class Shape(click.ParamType):
    """`P,D`: that many prefill and decode workers; `0,D`: aggregated ones. At least `decode_min` decode."""

    name = "P,D"

    def __init__(self, decode_min: int = 1) -> None:
        self._decode_min = decode_min

    def convert(
        self, value: str | tuple[int, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Two whole numbers."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"\s*([0-9]{1,3})\s*,\s*([0-9]{1,3})\s*", value, re.ASCII)
        if match is None or int(match[2]) < self._decode_min:
            self.fail(
                f"{value!r} is no P,D, such as 2,2 (prefill, decode) or 0,4 (four aggregated workers)", param, ctx
            )
        return int(match[1]), int(match[2])
