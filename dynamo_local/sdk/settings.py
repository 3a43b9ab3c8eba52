"""A section of the configuration against the pydantic model that its service declares.

Every refusal is one line that names the section, the key, what is allowed, and the nearest spelling.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dynamo_local.core.secrets import is_secret_key, mask_text
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.checks import unknown_key
from dynamo_local.sdk.service import DynamoService
from dynamo_local.sdk.service_config import ServiceConfig, underscored

M = TypeVar("M", bound=BaseModel)

_SHOWN_CHARACTERS = 60
_UNKNOWN_KEY = re.compile("unknown key '([^']+)'")
"""A model's own validator names the key in its text alone (`sdk.checks.unknown_key`)."""


def load_settings(service: DynamoService[Any]) -> Any:
    """The worker's validated options: an instance of the service's `config=` model, or None if it declared none.

    Reads `DYNAMO_SERVICE_CONFIG`. Raises `ConfigError`.
    """
    if service.config_model is None:
        return None
    return validate_section(
        service.config_model, service.name, ServiceConfig.get_instance().get_parsed_config(service.name)
    )


def validate_section(model: type[M], section: str, values: Mapping[str, Any]) -> M:
    """An instance of the model. Keys may be written with hyphens or underscores, by field name or alias.

    Unknown keys are refused unless the model allows extra ones; True and False are no numbers. Raises `ConfigError`.
    """
    names = accepted_names(model)
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = underscored(key)
        if name not in names:
            if model.model_config.get("extra") != "allow":
                raise ConfigError(f"{section}: {unknown_key(key, names)}", at=_at(section, key))
            given[key] = value
            continue
        field_name, feed = names[name]
        field = model.model_fields[field_name]
        if isinstance(value, bool) and not _takes_bool(field.annotation):
            said = f"{section}: {key} must be {_allowed(field.annotation)}, given {value!r} (a boolean)"
            raise ConfigError(said, at=_at(section, key))
        if feed in given:
            said = f"{section}: {key!r} and another spelling of it are both given; keep one"
            raise ConfigError(said, at=_at(section, key))
        given[feed] = value
    try:
        return model.model_validate(given)
    except ValidationError as error:
        said = _explain(model, section, error)
        loc = error.errors(include_url=False)[0]["loc"] or _UNKNOWN_KEY.findall(said)[:1]
        raise ConfigError(said, at=_at(section, *loc)) from None
    except Exception as error:
        # A validator of the user's own may raise anything; the person needs the section, not our stack.
        raise ConfigError(
            f"{section}: {model.__name__} failed with {type(error).__name__}: {_one_line(error)}"
        ) from error


def _at(section: str, *keys: str | int) -> tuple[str, ...]:
    """The path of a key. `section` ends with the name: `a.yaml: VllmWorker.ServiceArgs`."""
    return (*section.rpartition(": ")[2].split("."), *map(str, keys))


def accepted_names(model: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """Every spelling (with underscores) -> (field, the name that pydantic wants to be fed)."""
    by_name = bool(model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name"))
    names: dict[str, tuple[str, str]] = {}
    for field_name, field in model.model_fields.items():
        alias = field.validation_alias if isinstance(field.validation_alias, str) else field.alias
        feed = field_name if alias is None or by_name else alias
        names[underscored(field_name)] = (field_name, feed)
        if alias is not None:
            names[underscored(alias)] = (field_name, feed)
    return names


def _explain(model: type[BaseModel], section: str, error: ValidationError) -> str:
    details = error.errors(include_url=False)
    text = _explain_one(model, section, details[0])
    return f"{text} (and {len(details) - 1} more)" if len(details) > 1 else text


def _explain_one(model: type[BaseModel], section: str, detail: ErrorDetails) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    last = str(detail["loc"][-1]) if detail["loc"] else ""
    if detail["type"] == "missing":
        return f"{section}: {path} is required"
    if detail["type"] == "extra_forbidden":
        owner = _model_at(model, detail["loc"][:-1])
        known = accepted_names(owner) if owner else {}
        return f"{section}: {unknown_key(last, known).replace(repr(last), repr(path), 1)}"
    reason = _one_line(detail["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    if not path:
        return f"{section}: {reason}"
    value = detail["input"]
    shown = "a secret" if is_secret_key(last) else _shorten(mask_text(repr(value)))
    if detail["type"] == "string_type" and isinstance(value, int | float):
        reason += ' (put it in quotes: "…")'
    return f"{section}: {path}: {reason}; given {shown} ({type(value).__name__})"


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The nested model in which an error lies, as far as annotations tell."""
    for part in loc:
        field = model.model_fields.get(str(part))
        nested = (
            [t for t in _members_of(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]
            if field
            else []
        )
        if not nested:
            return None
        model = nested[0]
    return model


def _members_of(annotation: Any) -> list[Any]:
    """`int | None` -> [int, None]; `Literal["a", True]` -> the types of its values."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members_of(part)]
    if origin is typing.Literal:
        return [type(value) for value in typing.get_args(annotation)]
    return [annotation]


def _takes_bool(annotation: Any) -> bool:
    """False where pydantic would turn True into 1: only numbers do that."""
    members = _members_of(annotation)
    return bool in members or not {int, float}.intersection(m for m in members if isinstance(m, type))


def _allowed(annotation: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", type(None): "null"}
    return " or ".join(names.get(member, str(member)) for member in _members_of(annotation))


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _shorten(text: str) -> str:
    text = _one_line(text)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
