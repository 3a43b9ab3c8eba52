"""A value that fits a JSON schema: valid nonsense, the same for the same schema and key.

It is made so that it fits, never tried against the schema; each step and each character is paid from a budget, so a
schema that is recursive, or multiplies itself, ends in a 400 and not in work. Where it cannot be known that a value
fits (`not`, `if`, `contains`, …) the schema is refused by the keyword's name. `oneOf` is taken as `anyOf`, as by
xgrammar.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from dynamo_local.components.limits import shortened
from dynamo_local.components.sim_api.patterns import PatternError, text_matching
from dynamo_local.errors import InvalidRequest

# --- merging
# Two JSON schemas as one that asks for both, for `allOf` and for a `$ref` or `anyOf` with neighbours.


class Conflict(ValueError):
    """What both ask for together is not known."""


_MORE: Final = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_LESS: Final = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_ASSERTIONS: Final = frozenset({"pattern", "format", "const", "multipleOf", "anyOf", "oneOf", "prefixItems", "$ref"})
"""Of these two that differ have no common form here; of any other keyword (titles, …) the second stands."""


def merged(one: Any, other: Any, path: str) -> Any:
    """A schema for what fits both. Raises `Conflict`, or returns false where nothing does."""
    if one is False or other is False:
        return False
    if one is True or one == {}:
        return other
    if other is True or other == {}:
        return one
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        raise Conflict(f"{path}: a schema must be an object, true or false")
    out = dict(one)
    for key, value in other.items():
        out[key] = _both(key, out[key], value, path) if key in out else value
    return out


def _both(key: str, one: Any, other: Any, path: str) -> Any:
    if one == other:
        return one
    try:
        if key in _MORE:
            return max(one, other)
        if key in _LESS:
            return min(one, other)
        if key in _COMBINED:
            return _COMBINED[key](one, other)
    except (TypeError, AttributeError):
        raise Conflict(f"{path}: `{key}` is not of the right type") from None
    if key in _ASSERTIONS:
        raise Conflict(f"{path}: two different `{key}` for one value are not supported")
    return other


def _members(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(one)
    for name, schema in other.items():
        out[name] = _all(out[name], schema) if name in out else schema
    return out


def _all(one: Any, other: Any) -> Any:
    return one if one == other else {"allOf": [one, other]}


def _types(one: Any, other: Any) -> list[str]:
    first, second = (kind if isinstance(kind, list) else [kind] for kind in (one, other))
    common = [kind for kind in first if kind in second]
    if "integer" in first + second and "number" in first + second and "integer" not in common:
        common.append("integer")
    return common


_COMBINED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "properties": _members,
    "$defs": lambda one, other: {**one, **other},
    "required": lambda one, other: list(dict.fromkeys([*one, *other])),
    "type": _types,
    "enum": lambda one, other: [value for value in one if value in other] if len(one) * len(other) < 10_000 else one,
    "items": _all,
    "additionalProperties": _all,
    "propertyNames": _all,
    "uniqueItems": lambda one, other: one is True or other is True,
}


# --- scalars
# Strings and numbers that fit a JSON schema, from a budget that they share with what holds them.

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


MAX_DEPTH: Final = 32
FULL_DEPTH: Final = 3
"""Below it only what must be there is made, and of several forms the simplest."""

_REFUSED: Final = frozenset(
    {"not", "if", "then", "else", "contains", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"}
)
_KINDS: Final[Mapping[str, Sequence[str]]] = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_SIMPLEST: Final = ("null", "boolean", "integer", "number", "string", "array", "object")


def value_of(schema: Any, draw: random.Random, param: str) -> Any:
    """A value that fits. Raises `InvalidRequest` that names `param`, and the place in the schema."""
    try:
        return _Maker(schema, draw).make(schema, "#", 0)
    except (Unfit, Conflict, PatternError) as error:
        raise InvalidRequest(f"no answer can be made for this JSON schema: {error}", param=param) from None
    except Spent as error:
        raise InvalidRequest(str(error), param=param) from None
    except (RecursionError, OverflowError):
        raise InvalidRequest("this JSON schema is nested too deeply", param=param) from None


class _Maker(Scalars):
    def __init__(self, root: Any, draw: random.Random) -> None:
        super().__init__(draw)
        self._root = root
        self._by_type: dict[str, Callable[[Mapping[str, Any], str, int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": self.string,
            "integer": self.integer,
            "number": self.number,
            "boolean": lambda *_: self.draw.random() < 0.5,
            "null": lambda *_: None,
        }

    def make(self, schema: Any, path: str, depth: int) -> Any:
        """A value for the schema at that place."""
        if depth > MAX_DEPTH:
            raise Unfit(f"{path} is nested more than {MAX_DEPTH} deep")
        schema = self._plain(schema, path)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._branch(schema, word, path, depth)
        if "const" in schema:
            return self.paid(schema["const"])
        if "enum" in schema:
            return self._enum(schema, path)
        return self._by_type[self._type(schema, path, depth)](schema, path, depth)

    # --- forms ---------------------------------------------------------------------------------

    def _plain(self, schema: Any, path: str) -> Mapping[str, Any]:
        """Without `$ref` and `allOf`, which are put in their place."""
        while True:
            if schema is True:
                return {}
            if not isinstance(schema, Mapping):
                raise Unfit(f"{path} must be an object, or true" + (", not false" if schema is False else ""))
            members = schema.get("properties")
            self.spend(2 + len(schema) + (len(members) if isinstance(members, Mapping) else 0))
            if refused := sorted(_REFUSED & schema.keys()):
                raise Unfit(f"{path}: the keyword `{refused[0]}` is not supported")
            if "$ref" in schema:
                target = self._target(schema["$ref"], path)
                schema = merged(target, {k: v for k, v in schema.items() if k != "$ref"}, path)
            elif "allOf" in schema:
                rest: Any = {k: v for k, v in schema.items() if k != "allOf"}
                for part in _list(schema, "allOf", path):
                    plain = self._plain(part, path)
                    rest = merged(rest, plain, path)
                    self.spend(len(rest) + len(rest.get("properties", ())))
                schema = rest
            else:
                return schema

    def _target(self, ref: Any, path: str) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise Unfit(f"{path}: `$ref` must point into the schema itself (#/…), not to {shortened(str(ref))!r}")
        found = self._root
        for part in ref.split("/")[1:]:
            self.spend(1)
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and len(name) < 6 and int(name) < len(found):
                found = found[int(name)]
            else:
                raise Unfit(f"{path}: `$ref` {shortened(ref)!r} points to nothing")
        return found

    def _branch(self, schema: Mapping[str, Any], word: str, path: str, depth: int) -> Any:
        branches = list(enumerate(_list(schema, word, path)))
        self.spend(len(branches))
        first = self.draw.randrange(len(branches))
        branches = branches[first:] + branches[:first]
        if depth >= FULL_DEPTH:
            branches.sort(key=lambda branch: _simplicity(branch[1]))
        rest = {k: v for k, v in schema.items() if k != word}
        last: Exception | None = None
        for number, branch in branches:
            at = f"{path}/{word}/{number}"
            try:
                return self.make(merged(rest, self._plain(branch, at), at), at, depth + 1)
            except (Unfit, Conflict, PatternError) as error:
                last = error
        assert last is not None
        raise last

    def _enum(self, schema: Mapping[str, Any], path: str) -> Any:
        values = _list(schema, "enum", path)
        if "type" in schema:
            self.spend(len(values))
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            values = [value for value in values if _is_of(value, types)]
        if not values:
            raise Unfit(f"{path}: no value of `enum` is of the `type`")
        return self.paid(self.draw.choice(values))

    def _type(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        kind = schema.get("type")
        if kind is None:
            kind = next((name for name, words in _KINDS.items() if schema.keys() & set(words)), "string")
        if isinstance(kind, list) and kind and len(kind) <= len(_SIMPLEST):
            known = [one for one in _SIMPLEST if one in kind]
            kind = (known[0] if depth >= FULL_DEPTH else self.draw.choice(known)) if known else kind
        if not isinstance(kind, str) or kind not in self._by_type:
            raise Unfit(f"{path}: `type` {shortened(str(kind))!r} is none of JSON's")
        return kind

    # --- objects and arrays --------------------------------------------------------------------

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        members = _mapping(schema, "properties", path)
        required = _names(_list(schema, "required", path, empty=True), path)
        least, most = bounds(schema, "Properties", path)
        others = schema.get("additionalProperties", True)
        if "patternProperties" in schema:
            if members or required or least:
                raise Unfit(f"{path}: `patternProperties` beside other members is not supported")
            return {}
        self.spend(len(members) + len(required))
        made: dict[str, Any] = {}
        for name in self._with_dependents(schema, required, path):
            made[name] = self._member(made, name, members, others, path, depth)
        for name in members if depth < FULL_DEPTH else ():
            if name not in made and len(made) < most and "dependentRequired" not in schema:
                try:
                    made[name] = self._member(made, name, members, others, path, depth)
                except (Unfit, Conflict, PatternError):
                    continue  # it need not be there
        wanted = least if members or depth >= FULL_DEPTH or others is True else max(least, 1)
        while len(made) < min(wanted, most) and others is not False:
            name = self._new_name(schema, made, path, depth)
            made[name] = self._member(made, name, members, others, path, depth)
        if not least <= len(made) <= most:
            raise Unfit(f"{path}: an object of {least} or more members, {most:g} at most, cannot be made")
        return made

    def _with_dependents(self, schema: Mapping[str, Any], required: list[str], path: str) -> list[str]:
        wanted = dict.fromkeys(required)
        dependents = _mapping(schema, "dependentRequired", path)
        queue = list(wanted) if dependents else []
        while queue:
            for name in _names(_list(dependents, queue.pop(), path, empty=True), path):
                self.spend(1)
                if name not in wanted:
                    wanted[name] = None
                    queue.append(name)
        return list(wanted)

    def _member(
        self, made: Mapping[str, Any], name: str, members: Mapping[str, Any], others: Any, path: str, depth: int
    ) -> Any:
        self.pay(len(name) + 4)
        return self.make(members.get(name, others), f"{path}/{shortened(name)}", depth + 1)

    def _new_name(self, schema: Mapping[str, Any], made: Mapping[str, Any], path: str, depth: int) -> str:
        names = schema.get("propertyNames", True)
        for attempt in range(8):
            name = self.word() if names is True else self.make(merged({"type": "string"}, names, path), path, depth)
            if name not in made:
                return str(name)
            if attempt >= 4 and names is True:
                return f"{name}_{len(made)}"
        raise Unfit(f"{path}: no more names are known for `propertyNames`")

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> list[Any]:
        least, most = bounds(schema, "Items", path)
        items = schema.get("items", True)
        firsts = items if isinstance(items, list) else _list(schema, "prefixItems", path, empty=True)
        rest = schema.get("additionalItems", True) if isinstance(items, list) else items
        wanted = max(least, len(firsts))
        if not firsts and depth < FULL_DEPTH:
            wanted = max(least, self.draw.randint(1, 2))
        if rest is False:
            most = min(most, len(firsts))
        made: list[Any] = []
        seen: set[bytes] = set()
        unique = schema.get("uniqueItems") is True
        for _ in range(32 * min(wanted, MAX_STEPS)):
            if len(made) >= min(wanted, most):
                break
            self.pay(2)
            of = firsts[len(made)] if len(made) < len(firsts) else rest
            try:
                value = self.make(of, f"{path}/{len(made)}", depth + 1)
            except (Unfit, Conflict, PatternError):
                if len(made) >= least:
                    break
                raise
            if unique:
                encoded = msgspec.json.encode(value)
                if encoded in seen:
                    continue
                seen.add(encoded)
            made.append(value)
        if not least <= len(made) <= most:
            raise Unfit(f"{path}: an array of {least} or more items, {most:g} at most, cannot be made")
        return made


def _simplicity(schema: Any) -> int:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(kind, str) and kind in _SIMPLEST:
        return _SIMPLEST.index(kind)
    return 0 if isinstance(schema, Mapping) and ("const" in schema or "enum" in schema) else len(_SIMPLEST)


def _mapping(schema: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    value = schema.get(key, {})
    if not isinstance(value, Mapping):
        raise Unfit(f"{path}: `{key}` must be an object")
    return value


def _list(schema: Mapping[str, Any], key: str, path: str, *, empty: bool = False) -> list[Any]:
    value = schema.get(key, [])
    if not isinstance(value, list) or not (value or empty):
        raise Unfit(f"{path}: `{shortened(key)}` must be a list" + ("" if empty else " of at least one"))
    return value


def _names(values: list[Any], path: str) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise Unfit(f"{path}: names of members must be strings")
    return values


def _is_of(value: Any, types: Sequence[Any]) -> bool:
    names = {
        type(None): ("null",),
        bool: ("boolean",),
        int: ("integer", "number"),
        float: ("number",),
        str: ("string",),
        list: ("array",),
        dict: ("object",),
    }
    return any(name in types for name in names.get(type(value), ()))
