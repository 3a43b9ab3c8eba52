"""In the Processor: the simplest value that fits a JSON schema, and the simplest text that matches a pattern.

Objects have only what is required, arrays have as few items as allowed, and numbers are near zero. `jsonschema` checks
each value. A 400 names the keyword that asks for more. Budgets bound the cost of a schema to about a second.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dynamo_local.components.limits import MAX_PATTERN_LENGTH, shortened
from dynamo_local.errors import InvalidRequest

MAX_STEPS: Final = 10_000
"""Parts of a schema that one value may visit. The check of the value may visit as many."""
MAX_NODES: Final = 1_000
"""Members and items of a schema. The check of a schema takes about 0.5 ms for each."""
MAX_CHARS: Final = 16_384
"""Characters of one text. All texts of a value together may have as many."""
MAX_DEPTH: Final = 32

_CHOICES = ("$ref", "allOf", "anyOf", "oneOf")
_OBJECT = {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
_ARRAY = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}
_STRING = {"pattern", "format", "minLength", "maxLength"}
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_NUMBER = {*_BOUNDS, "multipleOf"}
_NOTES = "title description default examples $comment deprecated readOnly writeOnly $defs definitions discriminator"
_KNOWN = {"type", "enum", "const", *_CHOICES, *_NOTES.split()} | _OBJECT | _ARRAY | _STRING | _NUMBER
FORMATS: Final[Mapping[str, str]] = {
    "date": "2025-01-31",
    "time": "12:00:00Z",
    "date-time": "2025-01-31T12:00:00Z",
    "duration": "P1D",
    "email": "x@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "url": "https://example.com/",
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
        maker = _Maker(schema)
        value = maker.make(schema, 0)
        for error in _checker(schema, maker.matching).iter_errors(value):
            raise Unfit(f"`{error.validator}` asks for more than the simplest value")
    except (Unfit, Unresolvable, SchemaError) as error:
        reason = error.message if isinstance(error, SchemaError) else str(error)
        if isinstance(error, Unresolvable):
            reason = f"`$ref` points to nothing in the schema: {error.ref}"
        message = f"no value is known for this JSON schema: {shortened(reason, 200)}"
        raise InvalidRequest(message, param=param) from None
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
    kept = {name for name in value if name not in ("$schema", "$id") or not isinstance(value[name], str)}
    return {name: _plain(value[name], nodes) for name in value if name in kept}


def _checker(schema: Any, matching: set[tuple[str, str]]) -> Any:
    """A validator with a budget. It loads no `$ref` from elsewhere.

    It runs no client's pattern: a text matches if it was made for the pattern (`matching`). `oneOf` counts as `anyOf`,
    as in xgrammar.
    """
    from jsonschema import Draft202012Validator, ValidationError, validators
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    steps = iter(range(MAX_STEPS))

    def matches(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and (pattern, instance) not in matching:
            yield ValidationError("it was not made for this pattern")

    def counted(check: Any) -> Any:
        def one(*arguments: Any) -> Iterator[Any]:
            if next(steps, None) is None:
                raise _Spent
            yield from check(*arguments) or ()

        return one

    given = Draft202012Validator.VALIDATORS
    checks = {**given, "oneOf": given["anyOf"], "pattern": matches}
    counting = {name: counted(check) for name, check in checks.items()}
    return validators.extend(Draft202012Validator, counting)(schema, registry=REGISTRY)


class _Maker:
    """Makes one value. `matching` holds (pattern, text made for it)."""

    def __init__(self, root: Any) -> None:
        from referencing import Registry
        from referencing.jsonschema import DRAFT202012

        self._resolver: Any = Registry().resolver_with_root(DRAFT202012.create_resource(root))
        self._steps, self._chars = MAX_STEPS, MAX_CHARS
        self.matching: set[tuple[str, str]] = set()

    def _pay(self, steps: int, chars: int = 0) -> None:
        self._steps -= steps
        self._chars -= chars
        if min(self._steps, self._chars) < 0:
            raise _Spent

    def make(self, schema: Any, depth: int) -> Any:
        self._pay(1, 2)
        if depth > MAX_DEPTH:
            raise Unfit(f"it is nested deeper than {MAX_DEPTH}")
        if not isinstance(schema, Mapping):
            if schema:
                return {}
            raise Unfit("nothing fits `false`")
        for unknown in schema.keys() - _KNOWN:
            raise Unfit(f"`{shortened(unknown)}` is not supported")
        for keyword in _CHOICES:
            if keyword in schema:
                return self._applied(keyword, schema, depth + 1)
        if "const" in schema or "enum" in schema:
            value = schema["const"] if "const" in schema else schema["enum"][0]
            self._pay(1, len(str(value)))
            return value
        match _kind(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "number" | "integer":
                return _number(schema)
            case "boolean":
                return False
            case "null":
                return None
        return {}

    def _applied(self, keyword: str, schema: Mapping[str, Any], depth: int) -> Any:
        """Merges the keyword's schemas into the schema: all of them, or the first one that fits."""
        rest = {key: value for key, value in schema.items() if key != keyword}
        if keyword == "$ref":
            return self.make(self._merged(rest, self._resolver.lookup(schema["$ref"]).contents), depth)
        if keyword == "allOf":
            for part in schema["allOf"]:
                rest = self._merged(rest, part)
            return self.make(rest, depth)
        last = Unfit(f"`{keyword}` is empty")
        for branch in schema[keyword]:
            try:
                return self.make(self._merged(rest, branch), depth)
            except Unfit as error:
                last = error
        raise last

    def _merged(self, one: Any, other: Any) -> Any:
        """The keywords of both; `other` wins. The check of the value finds what is lost."""
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return one if other is True else False
        self._pay(len(other))
        out = {**one, **other}
        for key in one.keys() & other.keys() & {"properties", "required", "allOf"}:
            out[key] = {**one[key], **other[key]} if key == "properties" else [*one[key], *other[key]]
        return out

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        members, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        made = {}
        for name in schema.get("required", ()):
            self._pay(1, len(name))
            made[name] = self.make(members.get(name, others), depth + 1)
        return made

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        firsts, rest = schema.get("prefixItems", []), schema.get("items", True)
        made: list[Any] = []
        while len(made) < schema.get("minItems", 0):
            made.append(self.make(firsts[len(made)] if len(made) < len(firsts) else rest, depth + 1))
        return made

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", MAX_CHARS)
        self._pay(1, least)
        if "pattern" not in schema:
            return FORMATS.get(schema.get("format", "")) or "x" * min(max(least, 1), most)
        pattern = schema["pattern"]
        for repetitions in (0, least):
            self._pay(len(pattern))
            text = text_matching(pattern, repetitions)
            self._pay(0, len(text))
            if least <= len(text) <= most:
                self.matching.add((pattern, text))
                return text
        raise Unfit("no simple text fits `pattern` and the lengths")


def _kind(schema: Mapping[str, Any]) -> str:
    """Its type, the first of several. Without a type: the one that its keywords are about."""
    kind = schema.get("type")
    if kind is None:
        about = {"object": _OBJECT, "array": _ARRAY, "string": _STRING, "number": _NUMBER}
        kind = next((each for each, keywords in about.items() if keywords & schema.keys()), "")
    return kind if isinstance(kind, str) else kind[0]


def _number(schema: Mapping[str, Any]) -> Any:
    """Zero, or a number at a bound."""
    from jsonschema import Draft202012Validator

    step = schema.get("multipleOf", 1)
    bounds = [schema[key] for key in _BOUNDS if key in schema]
    near = (round(bound / step) * step + more * step for bound in bounds for more in (0, 1, -1))
    keywords = {"type", *_NUMBER} & schema.keys()
    checker = Draft202012Validator({key: schema[key] for key in keywords})
    for value in (0, *near, *bounds, sum(bounds) / 2):
        if checker.is_valid(value):
            return value
    raise Unfit(f"no simple number fits {', '.join(f'`{key}`' for key in sorted(keywords))}")


# Private, but the only parser of Python's expressions. A test of `text_matching` fails if a Python moves it.
_parser: Final = importlib.import_module("re._parser")
_compiler: Final = importlib.import_module("re._compiler")
_COMMON: Final = "a0A _-" + "".join(map(chr, range(0x21, 0x250))) + "\t"


def text_matching(pattern: str, repetitions: int = 0) -> str:
    """The simplest text that the whole pattern matches. Raises `Unfit`.

    Each part is repeated at least `repetitions` times if the pattern allows it. No text is matched against the whole
    pattern, so nothing can backtrack.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise Unfit(f"the regular expression is longer than {MAX_PATTERN_LENGTH:,} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a later Python may read otherwise
            parts = [(str(op), str(value), (op, value)) for op, value in _parser.parse(pattern)]
        begins = parts[:1] and parts[0][:2] == ("AT", "AT_BEGINNING")
        ends = parts[-1:] and parts[-1][:2] == ("AT", "AT_END")
        text = _text([part for *_, part in parts[bool(begins) : len(parts) - bool(ends)]], repetitions)
        text.encode()
    except (re.error, RecursionError, OverflowError, UnicodeEncodeError) as error:
        raise Unfit(f"{shortened(pattern)!r} is no regular expression, or is too large: {error}") from None
    return text


def _text(parts: Any, repetitions: int) -> str:
    text = ""
    for op, value in parts:
        match str(op), value:
            case "SUBPATTERN", (_, 0, 0, inner):
                text += _text(inner, repetitions)
            case "BRANCH", (_, branches):
                text += _text(branches[0], repetitions)
            case (("MAX_REPEAT" | "MIN_REPEAT"), (least, most, inner)):
                one, count = _text(inner, repetitions), min(int(most), max(least, repetitions))
                text += one * min(count, MAX_CHARS + 1)
            case "LITERAL", code:
                text += chr(code)
            case (("IN" | "NOT_LITERAL" | "ANY"), _):
                text += _character(op, value)
            case _:
                raise Unfit(f"no text is made here for {op} of a regular expression")
        if len(text) > MAX_CHARS:
            raise Unfit("the regular expression asks for too long a text")
    return text


def _character(op: Any, value: Any) -> str:
    """A common character of a class. Only one character is matched, so nothing can backtrack."""
    one = _compiler.compile(_parser.SubPattern(_parser.State(), [(op, value)]))
    for char in _COMMON:
        if one.match(char):
            return char
    raise Unfit("a class of the regular expression holds no common character")
