"""File, environment and command line -> one `Config`, once, at the edge."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_local.config.models import MODELS, commands_of, components_of, expanded
from dynamo_local.config.schema import HostConfig
from dynamo_local.config.yaml_text import Document, located_sections, parse_yaml
from dynamo_local.core.prewarmed import TINY_MODEL, engine_of
from dynamo_local.core.secrets import mask_config
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.checks import listing, nearest, parse_envs, respelt
from dynamo_local.sdk.service_config import underscored
from dynamo_local.sdk.settings import validate_section

# --- merge
# Sections as mappings: two spellings of one key become one, and what is laid over another is merged in depth.

SERVICE_ARGS = "ServiceArgs"
COMMON_CONFIGS = "common_configs"
_ALIASES = {"start_deadline": "start_deadline_s", "drain_deadline": "drain_deadline_s"}
"""Keys of `ServiceArgs` that may be written without their unit."""
_NO_ALIASES: Mapping[str, str] = {}


def normalise(sections: Mapping[str, Mapping[str, Any]], source: str) -> dict[str, dict[str, Any]]:
    """Keys of sections, of `ServiceArgs` and of its `resources` with underscores; `envs` and deeper keys as written.

    Deeper keys belong to whoever reads them (`kv-transfer-config: {...}`). Raises `ConfigError` where both
    spellings of a key are given, or `ServiceArgs` is misspelt.
    """
    return {name: _normalise_section(name, section, source) for name, section in sections.items()}


def _normalise_section(name: str, section: Mapping[str, Any], source: str) -> dict[str, Any]:
    for key in section:
        if key != SERVICE_ARGS and key.replace("-", "").replace("_", "").lower() == "serviceargs":
            raise ConfigError(f"{source}: {name}: unknown key {key!r}; did you mean 'ServiceArgs'?")
    if name == MODELS:  # its keys are names
        return {
            model: _underscored_keys(each, f"{name}.{model}", source) if isinstance(each, Mapping) else each
            for model, each in section.items()
        }
    found = _underscored_keys(section, name, source, keep=SERVICE_ARGS)
    args = found.get(SERVICE_ARGS)
    if args is None:
        found.pop(SERVICE_ARGS, None)
        return found
    if not isinstance(args, Mapping):
        raise ConfigError(f"{source}: {name}: ServiceArgs must hold workers, resources, envs, …, not {args!r}")
    args = _underscored_keys(args, f"{name}.ServiceArgs", source, aliases=_ALIASES)
    if isinstance(args.get("resources"), Mapping):
        args["resources"] = _underscored_keys(args["resources"], f"{name}.ServiceArgs.resources", source)
    if "envs" in args:
        args["envs"] = _envs(args["envs"], name, source)
    found[SERVICE_ARGS] = args
    return found


def _envs(given: Any, name: str, source: str) -> dict[str, str]:
    """As a mapping, so that Dynamo's list form merges, and is masked, like ours."""
    try:
        return parse_envs(given)
    except ValueError as error:
        raise ConfigError(f"{source}: {name}.ServiceArgs: {error}") from None


def _underscored_keys(
    mapping: Mapping[str, Any], path: str, source: str, *, keep: str = "", aliases: Mapping[str, str] = _NO_ALIASES
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in mapping.items():
        name = key if key == keep else underscored(key)
        name = aliases.get(name, name)
        if name in found:
            raise ConfigError(f"{source}: {path}: {spelt[name]!r} and {key!r} are one key; keep one of them")
        found[name], spelt[name] = value, key
    return found


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A new mapping: mappings are merged, everything else is replaced. So `resources` survives an override of
    `workers`.

    A key in the other spelling is the same key, and keeps the base's spelling.
    """
    merged = dict(base)
    spelling = {underscored(key): key for key in base}
    for key, value in over.items():
        own = key if key in merged else spelling.get(underscored(key), key)
        below = merged.get(own)
        merged[own] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


# --- overrides
# Command-line overrides: `--VllmWorker.ServiceArgs.workers=2`, `--VllmWorker.max-model-len 4096`, `--Svc.flag`.

_NUMBER = re.compile(r"-(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_HOW = "overrides are written --Service.key=value"


def parse_overrides(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sections, keys as written. A later word wins. Mappings merge in depth.

    A value that parses as JSON is JSON, else text. Under `ServiceArgs.envs` it is always text. A value that begins with
    `-` and is no number needs the `=`. Raises `ConfigError`, which names the wrong word.
    """
    sections: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        path, text = _split(word, rest)
        value: Any = (
            True if text is None else text if path[1:3] == [SERVICE_ARGS, "envs"] and path[3:] else parse_value(text)
        )
        if value is True and path[1:3] == [SERVICE_ARGS, "envs"]:
            raise ConfigError(f"{word!r} has no value: write --{'.'.join(path)}=value")
        _check_conflict(sections, path, word)
        sections = deep_merge(sections, _nest(path, value))
    return sections


def _split(word: str, rest: list[str]) -> tuple[list[str], str | None]:
    """The path of one override and the text of its value, taken from the following words where it stands there."""
    if not word.startswith("--"):
        raise ConfigError(f"unexpected word {word!r}: {_HOW}")
    name, equals, text = word[2:].partition("=")
    path = name.split(".")
    if len(path) < 2:
        raise ConfigError(f"unknown option {word!r}: {_HOW}, or see dynamo serve --help")
    if not all(path):
        raise ConfigError(f"{word!r} has an empty part in its name: {_HOW}")
    if path[1:3] == [SERVICE_ARGS, "envs"] and len(path) > 4:
        path = [*path[:3], ".".join(path[3:])]
    if equals:
        return path, text
    if rest and rest[0] == "=":  # `--Svc.key = value`, which Dynamo took
        if len(rest) < 2:
            raise ConfigError(f"{word!r} has no value after '=': {_HOW}")
        del rest[0]
        return path, rest.pop(0)
    if not rest or rest[0].startswith("--"):
        return path, None
    if rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0]):
        raise ConfigError(f"unexpected word {rest[0]!r} after {word!r}: if it is the value, write {word}={rest[0]}")
    return path, rest.pop(0)


def parse_value(text: str) -> Any:
    """JSON; `True`/`FALSE` too, as YAML has them; anything else is text, also what JSON calls NaN or 1e999."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(text)
    return number


def _nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _check_conflict(sections: Mapping[str, Any], path: Sequence[str], word: str) -> None:
    """`--A.b=1 --A.b.c=2`: which of the two is meant cannot be known."""
    at: Any = sections
    for depth, key in enumerate(path):
        if not isinstance(at, Mapping):
            raise ConfigError(f"{word!r} contradicts an earlier --{'.'.join(path[:depth])}, which has a plain value")
        if key not in at:
            return
        at = at[key]


def leaves(sections: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The plain values of sections, each with its path: `("Frontend", "port"), 18030`."""
    for key, value in sections.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def value_at(sections: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The value at that path; None where there is none."""
    at: Any = sections
    for key in path:
        at = at.get(key) if isinstance(at, Mapping) else None
    return at


def without(sections: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A copy without the value at that path. Mappings that are empty then go, too."""
    key, *rest = path
    below = sections.get(key)
    left = without(below, rest) if rest and isinstance(below, Mapping) else {}
    return {name: left if name == key else value for name, value in sections.items() if name != key or left}


DEPLOYMENT_ENV = "DYN_DEPLOYMENT_CONFIG"
COMMON, HOST, PLANNER = "Common", "Host", "Planner"
PLAN = "the plan"
"""Names the configuration that is made for models, or for a command, in errors."""


class Place(NamedTuple):
    """Where a key stands (`a.yaml, line 12`), and how it is spelt there."""

    where: str
    key: str


Places = Mapping[tuple[str, ...], Place]
"""Keyed by path, with underscores."""


def _path(keys: Sequence[str | int]) -> tuple[str, ...]:
    section, *below = map(str, keys)
    return (section, *map(underscored, below))


def _lines_of(document: Document, source: str) -> Places:
    lines = document.lines.items()
    return {_path(path): Place(f"{source}, line {line}", str(path[-1])) for path, line in lines if path}


@dataclass(frozen=True, slots=True)
class Config:
    """The merged configuration. `sections` has JSON types, keys with underscores, `Common` not yet applied.

    `source` names the file (or variable) for errors. Services' sections are checked by `resolve`, which
    knows the services.
    """

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    host: HostConfig = field(default_factory=HostConfig)
    source: str = "command line"
    planner_targets: Mapping[str, Any] = field(default_factory=dict)
    """`ttft` and `itl` in ms, for a planner without a section (`components.targets`)."""
    places: Places = field(default_factory=dict)
    models: tuple[str, ...] = ()
    """Components of the models of the section `Models`, which stands in `sections` as services."""

    def located(self, error: ConfigError) -> ConfigError:
        """The error with the file and the line of its key in the place of `source`, if it names its key.

        Keys are then spelt as they were written.
        """
        path, text = error.details.get("at"), str(error)
        place = None if path is None else self.place(path)
        if path is None or place is None or not text.startswith(self.source):
            return error
        written = {keys[-1]: each.key for keys, each in self.places.items() if keys[0] in (path[0], COMMON)}
        return type(error)(place + respelt(text.removeprefix(self.source), written), **error.details)

    def place(self, path: Sequence[str | int]) -> str | None:
        """Where the nearest key above that path stands; a service's key may stand in `Common`."""
        section, *keys = _path(path)
        for top in (section, COMMON):
            for end in range(len(keys), 0, -1):
                if (place := self.places.get((top, *keys[:end]))) is not None:
                    return place.where
        return self.places[(section,)].where if (section,) in self.places else None

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


def load_config(
    path: Path | None,
    *,
    env: Mapping[str, str],
    overrides: Sequence[str] = (),
    base: str | None = None,
    more: Sequence[Path] = (),
    kept: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Read the YAML of `path`, or of `DYN_DEPLOYMENT_CONFIG` in its place, and lay the command line's words over it.

    `more` files are laid over `path`, in order. `base`: YAML over which all of that is laid (`dynamo serve --model`).
    `kept` are words that this run had before: `overrides` are laid over them.

    Raises `ConfigError`: one line that names the source, the section and the key.
    """
    text = env.get(DEPLOYMENT_ENV, "")
    places: dict[tuple[str, ...], Place] = {}
    if text.strip():
        document = located_sections(text, DEPLOYMENT_ENV)
        source, below = DEPLOYMENT_ENV, document.value
        places |= _lines_of(document, DEPLOYMENT_ENV)
    elif path is not None:
        document = located_sections(_read(path), str(path))
        source, below = str(path), document.value
        places |= _lines_of(document, str(path))
        for each in more:
            document = located_sections(_read(each), str(each))
            over = normalise(document.value, str(each))
            source, below = f"{source}, {each}", deep_merge(normalise(below, source), over)
            places |= _lines_of(document, str(each))
    else:
        source, below = "command line", {}
    words = parse_overrides(overrides)
    above = deep_merge(kept or {}, normalise(words, "command line"))
    if base is not None:
        below = deep_merge(normalise(parse_yaml(base, PLAN), PLAN), normalise(below, source))
        source = PLAN if source == "command line" else f"{PLAN}, {source}"
    places |= {_path(said): Place("command line", said[-1]) for said, _ in leaves(deep_merge(kept or {}, words))}
    sections = deep_merge(normalise(below, source), above)
    if above and below:
        source += " and the command line"
    models = components_of(sections)
    config = Config(sections=with_models(sections, source), source=source, places=places, models=tuple(models))
    try:
        _check_common(config)
        return replace(config, host=validate_section(HostConfig, f"{source}: {HOST}", sections.get(HOST, {})))
    except ConfigError as error:
        raise config.located(error) from None


def with_models(sections: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The services of the section `Models` in its place, and the file's own sections laid over them."""
    if MODELS not in sections:
        return sections
    services = {name: each for name, each in sections.items() if name != MODELS}
    made = expanded(sections, source)
    if not commands_of(sections[MODELS]):
        for shared in made["Frontend"]["models"].values():
            component = shared["component"]
            shared["engine"] = _engine(deep_merge(made[component], services.get(component, {})), services)
    merged: dict[str, Any] = deep_merge(made, services)
    return merged


def _engine(worker: Mapping[str, Any], services: Mapping[str, Any]) -> str:
    """The engine of a worker with this section, also where `Common` says it. Its own checks say what is wrong."""
    said, listed = worker.get("engine"), worker.get(COMMON_CONFIGS)
    if said is None and isinstance(listed, list) and "engine" in listed:
        said = services.get(COMMON, {}).get("engine")
    return str(engine_of(said, worker.get("model"), TINY_MODEL))


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
            said = f"{config.source}: {name} is no service: it has neither ServiceArgs nor common-configs"
            raise ConfigError(said, at=(name, SERVICE_ARGS if SERVICE_ARGS in section else COMMON_CONFIGS))
        listed = section.get(COMMON_CONFIGS)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(key, str) for key in listed):
            raise ConfigError(
                f"{config.source}: {name}: common-configs must be a list of keys of Common, not {listed!r}",
                at=(name, COMMON_CONFIGS),
            )
        for key in listed:
            if underscored(key) not in common:
                raise ConfigError(
                    f"{config.source}: {name}: common-configs lists {key!r}, which Common does not have. "
                    f"Common has {listing(common)}{nearest(underscored(key), common)}",
                    at=(name, COMMON_CONFIGS),
                )
