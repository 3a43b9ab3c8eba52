"""File, environment and command line -> one `Config`, once, at the edge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_local.config.merge import COMMON_CONFIGS, SERVICE_ARGS, deep_merge, normalise
from dynamo_local.config.overrides import parse_overrides
from dynamo_local.config.schema import HostConfig
from dynamo_local.config.yaml_text import parse_yaml
from dynamo_local.core.secrets import mask_config
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.checks import listing, nearest
from dynamo_local.sdk.service_config import underscored
from dynamo_local.sdk.settings import validate_section

DEPLOYMENT_ENV = "DYN_DEPLOYMENT_CONFIG"
COMMON, HOST, PLANNER = "Common", "Host", "Planner"


@dataclass(frozen=True, slots=True)
class Config:
    """The merged configuration. `sections` has JSON types, keys with underscores, `Common` not yet applied.

    `source` names the file (or variable) for errors. Services' sections are checked by `resolve`, which
    knows the services.
    """

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    host: HostConfig = field(default_factory=HostConfig)
    source: str = "command line"

    def service(self, name: str) -> dict[str, Any]:
        """A service's own options: values of `Common` that it lists, its own merged over them; no `ServiceArgs`."""
        section = dict(self.sections.get(name, {}))
        section.pop(SERVICE_ARGS, None)
        common = self.sections.get(COMMON, {})
        listed = section.pop(COMMON_CONFIGS, None) or []
        # In depth: `--VllmWorker.sim.start-up-s=5` must not lose the `sim: {speed: …}` that came from Common.
        return deep_merge({underscored(key): common[underscored(key)] for key in listed}, section)

    def service_args(self, name: str) -> dict[str, Any]:
        """A service's `ServiceArgs` as given."""
        return dict(self.sections.get(name, {}).get(SERVICE_ARGS) or {})

    def merged_sections(self) -> dict[str, dict[str, Any]]:
        """Each section as its service sees it, `ServiceArgs` included; without `Host`."""
        merged = {}
        for name in self.sections:
            if name != HOST:
                args = self.service_args(name)
                merged[name] = {**self.service(name), **({SERVICE_ARGS: args} if args else {})}
        return merged

    def masked_sections(self) -> dict[str, Any]:
        """`merged_sections` and `Host` as they may be shown (`--dry-run`) or kept (statefile): secrets are `****`."""
        shown: dict[str, Any] = mask_config({**self.merged_sections(), **self._host_section()})
        return shown

    def service_config_json(self, *, masked: bool = False) -> str:
        """`DYNAMO_SERVICE_CONFIG` for workers. `envs` are left out: each worker has its own in its environment.

        With `masked`, fit for the statefile.
        """
        sections = self.merged_sections()
        for section in sections.values():
            if SERVICE_ARGS in section:
                section[SERVICE_ARGS] = {k: v for k, v in section[SERVICE_ARGS].items() if k != "envs"}
        return json.dumps(mask_config(sections) if masked else sections)

    def _host_section(self) -> dict[str, Any]:
        return {HOST: dict(self.sections[HOST])} if self.sections.get(HOST) else {}


def load_config(path: Path | None, *, env: Mapping[str, str], overrides: Sequence[str] = ()) -> Config:
    """Read the YAML of `path`, or of `DYN_DEPLOYMENT_CONFIG` in its place, and lay the command line's words over it.

    Raises `ConfigError`: one line that names the source, the section and the key.
    """
    text = env.get(DEPLOYMENT_ENV, "")
    if text.strip():
        source, below = DEPLOYMENT_ENV, parse_yaml(text, DEPLOYMENT_ENV)
    elif path is not None:
        source, below = str(path), parse_yaml(_read(path), str(path))
    else:
        source, below = "command line", {}
    above = normalise(parse_overrides(overrides), "command line")
    sections = deep_merge(normalise(below, source), above)
    if above and below:
        source += " and the command line"
    host = validate_section(HostConfig, f"{source}: {HOST}", sections.get(HOST, {}))
    config = Config(sections=sections, host=host, source=source)
    _check_common(config)
    return config


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(f"no configuration file {path}{nearest(path.name, near)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None


def _check_common(config: Config) -> None:
    common = config.sections.get(COMMON, {})
    for name, section in config.sections.items():
        if name in (COMMON, HOST) and (SERVICE_ARGS in section or COMMON_CONFIGS in section):
            raise ConfigError(f"{config.source}: {name} is no service: it has neither ServiceArgs nor common-configs")
        listed = section.get(COMMON_CONFIGS)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(key, str) for key in listed):
            raise ConfigError(
                f"{config.source}: {name}: common-configs must be a list of keys of Common, not {listed!r}"
            )
        for key in listed:
            if underscored(key) not in common:
                raise ConfigError(
                    f"{config.source}: {name}: common-configs lists {key!r}, which Common does not have; "
                    f"it has {listing(common)}{nearest(underscored(key), common)}"
                )
