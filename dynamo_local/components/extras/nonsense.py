"""A value that fits a JSON schema: valid nonsense, the same for the same schema and key.

It is made so that it fits, never tried against the schema; each step and each character is paid from a budget, so a
schema that is recursive, or multiplies itself, ends in a 400 and not in work. Where it cannot be known that a value
fits (`not`, `if`, `contains`, …) the schema is refused by the keyword's name. `oneOf` is taken as `anyOf`, as by
xgrammar.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from dynamo_local.components.extras.merging import Conflict, merged
from dynamo_local.components.extras.patterns import PatternError
from dynamo_local.components.extras.scalars import MAX_STEPS, Scalars, Spent, Unfit, bounds
from dynamo_local.components.limits import shortened
from dynamo_local.errors import InvalidRequest

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
