"""A worker's view of the configuration: the JSON in `DYNAMO_SERVICE_CONFIG`, under Dynamo's accessors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dynamo_local.errors import ConfigError

ENV_NAME = "DYNAMO_SERVICE_CONFIG"
_MISSING = object()


def underscored(key: str) -> str:
    """`max-model-len` -> `max_model_len`: the two spellings are one key."""
    return key.replace("-", "_")


class Section(dict[str, Any]):
    """One section. A key is found in either spelling, so that ported code with `section["block-size"]` works."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(self._own(key))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and super().__contains__(self._own(key))

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(self._own(key), default)

    def copy(self) -> Section:
        return Section(self)

    def _own(self, key: str) -> str:
        return key if super().__contains__(key) else underscored(key)


class ServiceConfig(dict[str, Any]):
    """All sections, by service. Values of `Common` are in the sections that list them in `common-configs`."""

    COMMON_CONFIG_SERVICE: ClassVar[str] = "Common"
    COMMON_CONFIG_KEY: ClassVar[str] = "common-configs"
    _instance: ClassVar[ServiceConfig | None] = None

    def __init__(self, sections: Mapping[str, Any] | None = None) -> None:
        super().__init__({name: _section(values) for name, values in (sections or {}).items()})

    @classmethod
    def get_instance(cls) -> ServiceConfig:
        """The process's configuration; empty if the variable is not set. Raises `ConfigError` if it is not JSON."""
        if cls._instance is None:
            cls._instance = cls.from_json(os.environ.get(ENV_NAME, ""))
        return cls._instance

    @classmethod
    def reset(cls) -> None:
        """Read the environment again at the next `get_instance`; for tests."""
        cls._instance = None

    @classmethod
    def from_json(cls, text: str) -> ServiceConfig:
        """Parse `{"VllmWorker": {...}, …}`. The text may hold secrets, so errors do not quote it."""
        try:
            sections = json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise ConfigError(f"{ENV_NAME} is not JSON: {error}; unset it, or let dynamo serve set it") from None
        if not isinstance(sections, dict) or not all(isinstance(values, dict) for values in sections.values()):
            raise ConfigError(f"{ENV_NAME} must be a JSON object with one object per service")
        return cls(sections)

    def get(self, service: str, key: Any = None, default: Any = None) -> Any:
        """`get(service, "key", default)` is one value; `get(service)` and `get(service, {})` are the whole section.

        A section is never a string, so a string in second place is a key.
        """
        if not isinstance(key, str):
            return super().get(service, key)
        return self.get_parsed_config(service).get(key, default)

    def require(self, service: str, key: str) -> Any:
        """One value, which must be there: else `ConfigError` (a `ValueError` in Dynamo)."""
        value = self.get(service, key, _MISSING)
        if value is _MISSING:
            raise ConfigError(f"{service}.{key} must be specified in the configuration")
        return value

    def get_parsed_config(self, service: str) -> Section:
        """The service's own options: `Common` applied, without `ServiceArgs` and `common-configs`."""
        section = Section(super().get(service) or {})
        section.pop("ServiceArgs", None)
        common = _section(super().get(self.COMMON_CONFIG_SERVICE) or {})
        for key in section.pop(underscored(self.COMMON_CONFIG_KEY), None) or ():
            if key in common and key not in section:
                section[underscored(key)] = common[key]
        return section

    def as_args(self, service: str, prefix: str = "") -> list[str]:
        """The options as command-line words, `--block-size 64`, with hyphens; True is a bare flag, None is left out.

        With a prefix, only the keys that begin with it, and without it.
        """
        wanted = underscored(prefix)
        return [
            word
            for key, value in self.get_parsed_config(service).items()
            if key.startswith(wanted)
            for word in _arguments("--" + key[len(wanted) :].replace("_", "-"), value)
        ]


def _section(values: Any) -> Section:
    return Section({key if key == "ServiceArgs" else underscored(key): value for key, value in dict(values).items()})


def _arguments(option: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    yield option
    if isinstance(value, bool):
        if not value:
            yield "false"
    elif isinstance(value, dict | list):
        yield json.dumps(value)
    else:
        yield str(value)
