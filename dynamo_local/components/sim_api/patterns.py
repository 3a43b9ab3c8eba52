"""A text that matches a regular expression, at a cost that is bounded whatever the expression is.

Python's own parser reads the expression; nothing is ever matched against it, so none can be made to backtrack.
"""

from __future__ import annotations

import importlib
import random
import re
import string
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dynamo_local.components.limits import MAX_PATTERN_LENGTH, shortened

# Private, but the only parser of Python's expressions; tests/unit/components/sim_api tells if a Python moves it.
_parser: Final = importlib.import_module("re._parser")

MAX_STEPS: Final = 4_000
MORE_REPEATS: Final = 3
"""How often more than it must something is repeated at most."""

_POOL: Final = string.ascii_lowercase + string.digits + string.ascii_uppercase + " _-.,:;!?/+*#@%&=()<>~é\t"
_CATEGORIES: Final[Mapping[str, Callable[[str], bool]]] = {
    "CATEGORY_DIGIT": lambda char: char in string.digits,
    "CATEGORY_NOT_DIGIT": lambda char: not char.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda char: not char.isspace(),
    "CATEGORY_WORD": lambda char: char.isascii() and (char.isalnum() or char == "_"),
    "CATEGORY_NOT_WORD": lambda char: not (char.isalnum() or char == "_"),
}


class PatternError(ValueError):
    """No text can be made for this expression: it is wrong, too large, or uses what is not known here."""


def text_matching(pattern: str, draw: random.Random, most: int) -> str:
    """A text of at most `most` characters that the whole expression matches. Raises `PatternError`."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PatternError(f"the regular expression is longer than {MAX_PATTERN_LENGTH:,} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python might read otherwise one day
            parsed = _parser.parse(pattern)
        writer = _Writer(draw, most)
        writer.sequence(parsed)
    except re.error as error:
        raise PatternError(f"{shortened(pattern)!r} is no regular expression: {error}") from None
    except (RecursionError, OverflowError):
        raise PatternError(
            f"the regular expression {shortened(pattern)!r} is nested too deeply, or too large"
        ) from None
    return "".join(writer.out)


class _Writer:
    """Walks the parsed expression and writes; `out` is what it wrote."""

    def __init__(self, draw: random.Random, most: int) -> None:
        self.out: list[str] = []
        self._draw = draw
        self._left = most
        self._steps = MAX_STEPS
        self._ended = False
        self._groups: dict[int, str] = {}

    def sequence(self, items: Any) -> None:
        for op, value in items:
            self._steps -= 1
            if self._steps < 0:
                raise PatternError("the regular expression asks for too long a text")
            self._one(str(op), value)

    def _one(self, op: str, value: Any) -> None:
        if op == "LITERAL":
            self._write(chr(value))
        elif op == "NOT_LITERAL":
            self._write(self._from_pool(lambda char: not _same(char, chr(value))))
        elif op == "ANY":
            self._write(self._from_pool(lambda _: True))
        elif op == "IN":
            self._write(self._from_set(value))
        elif op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            self._repeat(*value)
        elif op == "BRANCH":
            self.sequence(self._draw.choice(value[1]))
        elif op == "SUBPATTERN":
            start = len(self.out)
            self.sequence(value[3])
            if value[0] is not None:
                self._groups[value[0]] = "".join(self.out[start:])
        elif op == "ATOMIC_GROUP":
            self.sequence(value)
        elif op == "GROUPREF" and value in self._groups:
            self._write(self._groups[value])
        elif op == "AT":
            self._at(str(value))
        else:
            raise PatternError(f"no text can be made here for {op} of a regular expression")

    def _at(self, where: str) -> None:
        if where in ("AT_BEGINNING", "AT_BEGINNING_STRING") and not self.out:
            return
        if where in ("AT_END", "AT_END_STRING"):
            self._ended = True
            return
        raise PatternError("no text can be made here for a boundary within a regular expression")

    def _repeat(self, least: int, most: int, item: Any) -> None:
        for n in range(least + self._draw.randint(0, min(int(most) - least, MORE_REPEATS))):
            if n >= least and not self._left:
                return  # there is no room for more than it must be
            self.sequence(item)

    def _write(self, text: str) -> None:
        if self._ended and text:
            raise PatternError("the regular expression goes on behind its end ($)")
        self._left -= len(text)
        if self._left < 0:
            raise PatternError("the regular expression asks for too long a text")
        if text:
            self.out.append(text)

    def _from_pool(self, fits: Callable[[str], bool]) -> str:
        chars = [char for char in _POOL if fits(char)]
        if not chars:
            raise PatternError("a class of the regular expression holds no common character")
        return self._draw.choice(chars)

    def _from_set(self, items: Sequence[tuple[Any, Any]]) -> str:
        if str(items[0][0]) == "NEGATE":
            return self._from_pool(lambda char: not any(_holds(item, char) for item in items[1:]))
        op, value = self._draw.choice(items)
        if str(op) == "LITERAL":
            return chr(value)
        if str(op) == "RANGE":
            code = self._draw.randint(*value)
            return chr(value[0]) if 0xD800 <= code <= 0xDFFF else chr(code)  # surrogates are no characters
        return self._from_pool(lambda char: _holds((op, value), char))


def _holds(item: tuple[Any, Any], char: str) -> bool:
    """Whether a member of a class may match the character, in either case."""
    op, value = str(item[0]), item[1]
    if op == "LITERAL":
        return _same(char, chr(value))
    if op == "RANGE":
        return any(value[0] <= ord(one) <= value[1] for each in (char.lower(), char.upper()) for one in each)
    return _CATEGORIES[str(value)](char)


def _same(one: str, other: str) -> bool:
    return one.lower() == other.lower()
