"""In the Processor: the simplest value that fits a JSON schema, and the simplest text that matches a pattern.

`jsonschema` checks each value. A schema that needs more than the keywords below is refused, and the error names the
keyword. Every step and every character is paid from a budget, so that no schema costs more than a second.
"""

from __future__ import annotations

import importlib
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from dynamo_local.components.limits import MAX_PATTERN_LENGTH, shortened
from dynamo_local.errors import InvalidRequest

MAX_STEPS: Final = 10_000
"""Keywords, members and repetitions that one value may take, and again the keywords that its check may take."""
MAX_NODES: Final = 1_000
"""Members and items of a schema. Its own check takes some 0.5 ms for each of them."""
MAX_CHARS: Final = 16_384
MAX_DEPTH: Final = 32
FULL_DEPTH: Final = 3
"""Members that are not required are left out below this depth, so that recursive schemas end."""

_OBJECT = {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
_ARRAY = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}
_STRING = {"pattern", "format", "minLength", "maxLength"}
_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_NOTES = "title description default examples $schema $id $comment deprecated readOnly writeOnly $defs definitions"
_KNOWN = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "discriminator", *_NOTES.split()}
_KNOWN |= _OBJECT | _ARRAY | _STRING | _NUMBER
FORMATS: Final[Mapping[str, str]] = {
    "date": "2025-01-31",
    "time": "12:00:00Z",
    "date-time": "2025-01-31T12:00:00Z",
    "duration": "P1D",
    "email": "amber@example.com",
    "hostname": "amber.example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/amber",
    "url": "https://example.com/amber",
    "uuid": "6f9619ff-8b86-4d01-b42d-00cf4fc964ff",
}


class Unfit(ValueError):
    """No value is known for this part of the schema. Another branch may have one."""


class _Spent(Exception):
    """The budget is used up, so that no other branch is tried."""


def value_of(schema: Any, param: str) -> Any:
    """The simplest value that fits. Raises `InvalidRequest` that names `param` and the keyword."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing.exceptions import Unresolvable

    try:
        schema = _plain(schema, iter(range(MAX_NODES)))
        Draft202012Validator.check_schema(schema)
        value = _Maker(schema).make(schema, 0)
        for error in _checker(schema).iter_errors(value):
            raise Unfit(f"`{error.validator}` asks for more than the simplest value")
    except (Unfit, Unresolvable, SchemaError) as error:
        shown = shortened(error.message if isinstance(error, SchemaError) else str(error), 200)
        raise InvalidRequest(f"no value is known for this JSON schema: {shown}", param=param) from None
    except (_Spent, RecursionError, ArithmeticError):
        raise InvalidRequest("this JSON schema, or the value that it asks for, is too large", param=param) from None
    return value


def _plain(value: Any, nodes: Iterator[int]) -> Any:
    """Without `$schema` and `$id`: the library would leave our budget, and turn to another root, at them."""
    if next(nodes, None) is None:
        raise _Spent
    if isinstance(value, list):
        return [_plain(each, nodes) for each in value]
    if not isinstance(value, Mapping):
        return value
    if "patternProperties" in value:
        raise Unfit("`patternProperties` is not supported")
    return {
        name: _plain(each, nodes)
        for name, each in value.items()
        if name not in ("$schema", "$id") or not isinstance(each, str)
    }


def _checker(schema: Any) -> Any:
    """A validator with a budget. It loads no `$ref` from elsewhere, and runs no pattern of a client's.

    `oneOf` counts as `anyOf`, as in xgrammar.
    """
    from jsonschema import Draft202012Validator, validators
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    steps = MAX_STEPS

    def counted(check: Any) -> Any:
        def one(validator: Any, value: Any, instance: Any, of: Any) -> Iterator[Any]:
            nonlocal steps
            steps -= 1
            if steps < 0:
                raise _Spent
            yield from check(validator, value, instance, of) or ()

        return one

    given = Draft202012Validator.VALIDATORS
    checks = {**given, "oneOf": given["anyOf"], "pattern": lambda *_: ()}
    counting = {name: counted(check) for name, check in checks.items()}
    return validators.extend(Draft202012Validator, counting)(schema, registry=REGISTRY)


class _Maker:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps, self._chars = MAX_STEPS, MAX_CHARS

    def _pay(self, chars: int, steps: int = 1) -> None:
        self._chars -= chars
        self._steps -= steps
        if min(self._chars, self._steps) < 0:
            raise _Spent

    def make(self, schema: Any, depth: int) -> Any:
        self._pay(2)
        if schema is False or depth > MAX_DEPTH:
            raise Unfit("nothing fits `false`" if schema is False else f"it is nested deeper than {MAX_DEPTH}")
        if schema is True:
            return "amber"
        for unknown in schema.keys() - _KNOWN:
            raise Unfit(f"`{shortened(unknown)}` is not supported")
        for word in ("$ref", "allOf", "anyOf", "oneOf"):
            if word in schema:
                rest = {key: value for key, value in schema.items() if key != word}
                return self._applied(rest, word, schema[word], depth + 1)
        if "pattern" in schema and not {"const", "enum"} & schema.keys():
            return self._of_pattern(schema)
        kind = schema.get("type") or (
            "object" if _OBJECT & schema.keys() else "array" if _ARRAY & schema.keys() else ""
        )
        if not {"const", "enum"} & schema.keys() and kind in ("object", "array"):
            return (self._object if kind == "object" else self._array)(schema, depth)
        return self._scalar(schema)

    def _applied(self, rest: Mapping[str, Any], word: str, value: Any, depth: int) -> Any:
        if word == "$ref":
            return self.make(self._merged(rest, self._target(value)), depth)
        if word == "allOf":
            for part in value:
                rest = self._merged(rest, part)
            return self.make(rest, depth)
        last = Unfit(f"`{word}` is empty")
        for branch in value:
            try:
                return self.make(self._merged(rest, branch), depth)
            except Unfit as error:
                last = error
        raise last

    def _target(self, ref: str) -> Any:
        if not ref.startswith("#"):
            raise Unfit(f"`$ref` must point into the schema itself (#/…), not to {shortened(ref)!r}")
        found = self._root
        for part in ref.split("/")[1:]:
            self._pay(0)
            name = part.replace("%25", "%").replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            raise Unfit(f"`$ref` {shortened(ref)!r} points to nothing")
        return found

    def _merged(self, one: Any, other: Any) -> Any:
        """The keywords of both. The check of the value finds what this loses."""
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return one if other is True else False
        self._pay(0, len(other))
        out = {**one, **other}
        for key in one.keys() & other.keys():
            if key in ("properties", "$defs"):
                out[key] = {**one[key], **other[key]}
            elif key in ("required", "allOf"):
                out[key] = [*one[key], *other[key]]
            elif key in _NUMBER | _STRING | _ARRAY | _OBJECT and isinstance(one[key], int | float):
                out[key] = (max if "min" in key.lower() else min)(one[key], other[key])
        return out

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        members, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        made: dict[str, Any] = {}
        for name in dict.fromkeys([*required, *(members if depth < FULL_DEPTH else ())]):
            if name in required or len(made) < schema.get("maxProperties", math.inf):
                try:
                    self._pay(len(name))
                    made[name] = self.make(members.get(name, others), depth + 1)
                except Unfit:
                    if name in required:
                        raise
        while len(made) < schema.get("minProperties", 0):
            self._pay(10)
            made[f"member{len(made)}"] = self.make(others, depth + 1)
        return made

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        firsts, rest, least = schema.get("prefixItems", []), schema.get("items", True), schema.get("minItems", 0)
        wanted = max(least, len(firsts) or (depth < FULL_DEPTH and rest is not False))
        each = rest.get("enum", []) if schema.get("uniqueItems") and isinstance(rest, Mapping) else []
        made: list[Any] = []
        while len(made) < min(wanted, schema.get("maxItems", wanted)):
            n = len(made)
            item = firsts[n] if n < len(firsts) else {"const": each[n]} if n < len(each) else rest
            try:
                made.append(self.make(item, depth + 1))
            except Unfit:
                if n < least:
                    raise
                break
        return made

    def _of_pattern(self, schema: Mapping[str, Any]) -> str:
        most = min(schema.get("maxLength", MAX_CHARS), self._chars)
        for more in (0, 1, 2, 4, 16, 64):
            self._pay(0, 200)
            text = text_matching(schema["pattern"], more, most)
            if schema.get("minLength", 0) <= len(text) <= most:
                self._pay(len(text))
                return text
        raise Unfit("no text fits `pattern` and the lengths")

    def _scalar(self, schema: Mapping[str, Any]) -> Any:
        """The first of some values that the library takes."""
        from jsonschema import Draft202012Validator

        least = schema.get("minLength", 0)
        self._pay(least)
        text = FORMATS.get(schema.get("format", ""), "amber"[: schema.get("maxLength")])
        step = schema.get("multipleOf", 1)
        ends = [schema[key] for key in _NUMBER & schema.keys() if key != "multipleOf"]
        tried = [text, text.ljust(least, "x"), 0, *ends, sum(ends) / 2, True, None]
        tried += [turn(end / step) * step + n * step for end in ends for turn in (round, int) for n in (0, 1, -1)]
        if {"const", "enum"} & schema.keys():
            tried = [schema["const"]] if "const" in schema else schema["enum"]
        checked = {"type", "const", "enum", "minLength", "maxLength", *_NUMBER} & schema.keys()
        checker = Draft202012Validator({key: schema[key] for key in checked})
        for value in tried:
            if "pattern" not in schema and checker.is_valid(value):
                self._pay(len(msgspec.json.encode(value)))
                return value
        words = ", ".join(f"`{key}`" for key in sorted(schema.keys() - set(_NOTES.split())))
        raise Unfit(f"no simple value fits {shortened(words, 150)}")


# --- patterns: Python's own parser reads the expression. Nothing is matched against it, so nothing can backtrack.

# Private, but the only parser of Python's expressions. A test of `text_matching` fails if a Python moves it.
_parser: Final = importlib.import_module("re._parser")
_POOL: Final = "a0A _-.,:;!?/é\t"
_CATEGORIES: Final = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


def text_matching(pattern: str, more: int, most: int) -> str:
    """The simplest text that the whole pattern matches, with `more` repetitions than needed. Raises `Unfit`."""
    try:
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise Unfit(f"the regular expression is longer than {MAX_PATTERN_LENGTH:,} characters")
        writer = _Writer(more, most)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a later Python may read otherwise
            writer.sequence(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise Unfit(f"{shortened(pattern)!r} is no regular expression, or is too large: {error}") from None
    return writer.text


class _Writer:
    def __init__(self, more: int, most: int) -> None:
        self.text = ""
        self._more, self._most, self._steps, self._ended = more, most, MAX_STEPS, False

    def sequence(self, items: Any) -> None:
        for op, value in [("", None), *items]:  # the first pays for an empty sequence
            self._steps -= 1
            if self._steps < 0:
                raise Unfit("the regular expression asks for too long a text")
            match str(op), value:
                case "", _:
                    pass
                case "SUBPATTERN", (_, 0, 0, inner):
                    self.sequence(inner)
                case "BRANCH", (_, branches):
                    self.sequence(branches[0])
                case (("MAX_REPEAT" | "MIN_REPEAT"), (least, most, inner)):
                    for _ in range(min(int(most), least + self._more)):
                        self.sequence(inner)
                case "AT", where if str(where) == "AT_BEGINNING" and not self.text:
                    pass
                case "AT", where if str(where) == "AT_END":
                    self._ended = True
                case (("LITERAL" | "NOT_LITERAL" | "ANY" | "IN"), _) if not self._ended:
                    self.text += _character(value if str(op) == "IN" else [(op, value)])
                case _:
                    raise Unfit(f"no text is made here for {op} of a regular expression")
        if len(self.text) > self._most:
            raise Unfit("the regular expression asks for too long a text")


def _character(members: list[tuple[Any, Any]]) -> str:
    """A character that one of these allows, or that none forbids."""
    negated = str(members[0][0]) == "NEGATE"
    own = [chr(value if str(op) == "LITERAL" else value[0]) for op, value in members if str(op) in ("LITERAL", "RANGE")]
    for char in (*own, *_POOL):
        if any(_holds(str(op), value, char) for op, value in members) != negated:
            return char
    raise Unfit("a class of the regular expression holds no common character")


def _holds(op: str, value: Any, char: str) -> bool:
    if op in ("LITERAL", "NOT_LITERAL"):
        return (ord(char) == value) == (op == "LITERAL")
    if op == "RANGE":
        return bool(value[0] <= ord(char) <= value[1])
    if op != "CATEGORY":
        return op == "ANY"
    _, *no, name = str(value).split("_")  # such as CATEGORY_NOT_DIGIT
    return (re.fullmatch(_CATEGORIES[name], char) is None) == bool(no)
