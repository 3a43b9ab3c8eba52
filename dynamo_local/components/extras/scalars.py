"""Strings and numbers that fit a JSON schema, from a budget that they share with what holds them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec

from dynamo_local.components.extras.patterns import text_matching

PATTERN_STEPS: Final = 200
"""What one try at a regular expression is charged."""

MAX_STEPS: Final = 10_000
"""Keywords and members that are looked at for one value: some 50 ms."""

MAX_CHARS: Final = 16_384
"""Characters of one value."""

WORDS: Final = (
    "amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "indigo", "juniper", "kelp", "lagoon",
    "maple", "nickel", "opal", "pebble", "quartz", "river", "saffron", "tundra", "umber", "velvet", "willow", "zephyr",
)  # fmt: skip


class Unfit(ValueError):
    """No value is known that fits this part of the schema; another branch may have one."""


class Spent(Exception):
    """The budget is used up."""


class Scalars:
    """Makes them, and keeps the budget."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS

    def spend(self, steps: int) -> None:
        """So many keywords or members were looked at. Raises `Spent`."""
        self._steps -= steps
        if self._steps < 0:
            raise Spent("this JSON schema, or the value that it asks for, is too large")

    def pay(self, chars: int) -> None:
        """So many characters go into the value. Raises `Spent`."""
        self._chars -= chars
        if self._chars < 0:
            raise Spent(f"this JSON schema asks for a value of more than {MAX_CHARS:,} characters")

    def paid(self, value: Any) -> Any:
        """The value, whose characters are paid."""
        self.pay(len(value) + 2 if isinstance(value, str) else len(msgspec.json.encode(value)))
        return value

    def word(self) -> str:
        """One of them."""
        return self.draw.choice(WORDS)

    def string(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        """A text."""
        least, most = bounds(schema, "Length", path)
        if isinstance(pattern := schema.get("pattern"), str):
            for _ in range(8):
                self.spend(PATTERN_STEPS)
                text = text_matching(pattern, self.draw, min(self._chars, int(min(most, MAX_CHARS))))
                if least <= len(text):
                    return str(self.paid(text))
            raise Unfit(f"{path}: no text that fits `pattern` and the lengths was found")
        if (form := schema.get("format")) in FORMATS:
            text = FORMATS[form](self.draw)
            if not least <= len(text) <= most:
                raise Unfit(f"{path}: no text that fits `format` and the lengths was found")
            return str(self.paid(text))
        self.pay(least)
        words = [self.word() for _ in range(self.draw.randint(1, 3))]
        text = " ".join(words)
        text += " " * (text != "" and len(text) < least) + self.word() * (1 + least // 4) * (len(text) < least)
        return str(self.paid(text[: int(min(most, max(least, len(" ".join(words)))))]))

    def integer(self, schema: Mapping[str, Any], path: str, depth: int) -> int:
        """A whole number."""
        low, high = _range(schema, path, 1)
        step = schema.get("multipleOf", 1)
        if not _is_number(step) or step <= 0:
            raise Unfit(f"{path}: `multipleOf` must be a number above 0")
        ratio = Decimal(str(step)).as_integer_ratio()[0]  # the least integer that is a multiple of n/d is n
        first, last = math.ceil(low / ratio), math.floor(high / ratio)
        if first > last:
            raise Unfit(f"{path}: there is no integer within its bounds")
        return int(self.paid(self.draw.randint(first, last) * ratio))

    def number(self, schema: Mapping[str, Any], path: str, depth: int) -> int | float:
        """A number."""
        if "multipleOf" in schema:
            step = schema["multipleOf"]
            if not _is_number(step) or step <= 0:
                raise Unfit(f"{path}: `multipleOf` must be a number above 0")
            low, high = _range(schema, path, step)
            unit = Decimal(str(step))
            first = int((Decimal(str(low)) / unit).to_integral_value("ROUND_CEILING"))
            last = int((Decimal(str(high)) / unit).to_integral_value("ROUND_FLOOR"))
            if first > last:
                raise Unfit(f"{path}: there is no number within its bounds")
            for _ in range(16):
                value = float(self.draw.randint(first, last) * unit)
                if (value / step).is_integer():  # many validators divide binary fractions, as here
                    return self.paid(int(value) if value.is_integer() else value)  # type: ignore[no-any-return]
            raise Unfit(f"{path}: no number was found that is a multiple of {step:g} in binary fractions, too")
        low, high = _range(schema, path, 0)
        value = round(low + (high - low) * (0.25 + self.draw.random() / 2), 2)
        if not low < value < high:
            value = low + (high - low) / 2
        ends = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
        if not low <= value <= high or value in [end for end in ends if _is_number(end)]:
            raise Unfit(f"{path}: there is no number within its bounds")
        return self.paid(value)  # type: ignore[no-any-return]


def _hex(draw: random.Random, *lengths: int) -> str:
    return "-".join(f"{draw.getrandbits(4 * n):0{n}x}" for n in lengths)


def _date(draw: random.Random) -> str:
    return f"{draw.randint(1990, 2030)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"


def _time(draw: random.Random) -> str:
    return f"{draw.randrange(24):02}:{draw.randrange(60):02}:{draw.randrange(60):02}Z"


FORMATS: Final[Mapping[Any, Callable[[random.Random], str]]] = {
    "date": _date,
    "time": _time,
    "date-time": lambda draw: f"{_date(draw)}T{_time(draw)}",
    "duration": lambda draw: f"P{draw.randint(1, 30)}D",
    "email": lambda draw: f"{draw.choice(WORDS)}@example.com",
    "hostname": lambda draw: f"{draw.choice(WORDS)}.example.com",
    "ipv4": lambda draw: f"192.0.2.{draw.randint(1, 254)}",
    "ipv6": lambda draw: f"2001:db8::{draw.randint(1, 0xFFFF):x}",
    "uri": lambda draw: f"https://example.com/{draw.choice(WORDS)}",
    "url": lambda draw: f"https://example.com/{draw.choice(WORDS)}",
    "uuid": lambda draw: "{}-{}-4{}-a{}-{}".format(*_hex(draw, 8, 4, 3, 3, 12).split("-")),
}
"""Formats that have a form; any other is only a remark."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _range(schema: Mapping[str, Any], path: str, step: float) -> tuple[Any, Any]:
    """Both ends inclusive; an exclusive one is moved by `step` (of an integer: to the next)."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    for value in (low, high, above, below):
        if value is not None and not _is_number(value):
            raise Unfit(f"{path}: a bound must be a number of at most 15 digits")
    if above is not None:
        # A step below the next multiple is still above; with integers floor + 1 is exact.
        moved = math.floor(above) + 1 if step == 1 else above + step / 2
        low = moved if low is None else max(low, moved)
    if below is not None:
        moved = math.ceil(below) - 1 if step == 1 else below - step / 2
        high = moved if high is None else min(high, moved)
    if low is None and high is None:
        low = 0
    span = max(100, 10 * step)
    low = (high or 0) - span if low is None else low
    high = low + span if high is None else high
    if low > high:
        raise Unfit(f"{path}: its bounds leave no number")
    return low, high


def bounds(schema: Mapping[str, Any], what: str, path: str) -> tuple[int, float]:
    """`min…` and `max…` of that name."""
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", math.inf)
    for value in (least, most):
        whole = isinstance(value, int) or (isinstance(value, float) and (value.is_integer() or value == math.inf))
        if not whole or isinstance(value, bool) or value < 0:
            raise Unfit(f"{path}: min{what} and max{what} must be whole numbers")
    if least > most:
        raise Unfit(f"{path}: min{what} is above max{what}")
    if least > MAX_STEPS:
        raise Unfit(f"{path}: min{what} is above {MAX_STEPS:,}")
    return int(least), most
