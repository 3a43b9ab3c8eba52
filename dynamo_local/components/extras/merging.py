"""Two JSON schemas as one that asks for both, for `allOf` and for a `$ref` or `anyOf` with neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final


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
