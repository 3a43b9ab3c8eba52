"""Numbers on the command line. `nan` is within every range that click knows: it compares with nothing."""

from __future__ import annotations

import math
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
