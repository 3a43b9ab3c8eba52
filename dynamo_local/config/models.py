"""The section `Models`: several models behind one Frontend, which share the GPUs of the host.

    Models:
      qwen:                        # its name in the API, and of its workers' component
        model: /models/Qwen3-8B
        engine: vllm
        gpus: 1                    # of one worker
        floor: 0                   # it may give all GPUs back
      llama: …

Each model becomes two services: its workers, `qwen`, and its Processor, `qwen_Processor`. With `router: kv` or `slo` it
has a Router as well, `qwen_Router`. With `prefill: 1` each worker has a prefill worker beside it, of the component
`qwen_PrefillWorker`. Keys that are not about the model's place are its workers' options. A section of that name in the
file is laid over them.

A model with a `command` is a server of `runtime: http`, which needs no Processor. Its Frontend passes requests on, so a
section has commands only, or none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from dynamo_local.config.schema import Seconds, SharingArgs
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.settings import validate_section

MODELS = "Models"
COMMAND = "command"
GRAPHS = "dynamo_local.components.graphs"
SEPARATOR = "__"
"""Between the names of the components in the graph's name: `models__qwen__llama`."""
MODELS_MAX = 64
_TO_ALL = ("ttft", "itl")
_TO_PROCESSOR = ("serve_args", "router", "max_tries", "migration_limit")
_TO_ROUTER = ("router", "kv_block_expiry_s")
_ROUTED = ("kv", "slo")
"""Policies that know what each worker has cached: a Router follows that."""
TO_PREFILL = frozenset({"max_concurrent_prefills"})
_NOT_TO_WORKER = frozenset((*_TO_PROCESSOR, *_TO_ROUTER, *TO_PREFILL))
TO_DECODE = frozenset(
    {
        "conditional_disagg",
        "disagg_policy",
        "kv_events",
        "kv_pull_timeout_s",
        "max_local_prefill_length",
        "max_num_waiting",
        "max_prefill_queue_size",
        "prefill_timeout_s",
        "profile_results_dir",
        "remote_prefill",
        *_TO_ALL,
    }
)
"""Options of a worker that its prefill workers do not read."""


class ModelSection(SharingArgs):
    """One model of the section `Models`. Other keys are options of its workers."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    model: Annotated[str, Field(min_length=1)] | None = None
    """A folder, or sim-tiny. A command has it as `{model}`."""
    command: str | list[str | int | float] | None = None
    """A server instead of an engine, as in a section of `runtime: http`."""
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    """Its name in the API, where the key is another one."""
    aliases: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further names of a command in the API, which its server must list as well."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs of one worker."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Workers at the start. None: the floor."""
    prefill: Annotated[int, Field(ge=0, le=8)] = 0
    """Prefill workers beside each worker, with as many GPUs each. 0: a worker computes its prompts itself."""
    max_held: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    """Requests that are held at once; beyond it 503 with Retry-After."""
    max_held_bytes: Annotated[int, Field(ge=0)] = 64 * 1024 * 1024
    """Bytes of their bodies."""
    standby: Annotated[int, Field(ge=0, le=64)] | None = None
    envs: Any = None
    start_deadline_s: Seconds | None = None
    drain_deadline_s: Seconds | None = None

    @model_validator(mode="after")
    def _starts_within(self) -> Self:
        if self.workers is not None and self.workers < self.floor:
            raise ValueError(f"workers is {self.workers}, fewer than its floor of {self.floor}")
        if self.cap is not None and self.workers is not None and self.workers > self.cap:
            raise ValueError(f"workers is {self.workers}, more than its cap of {self.cap}")
        if self.command is None and self.model is None:
            raise ValueError("it needs a model, or a command")
        if self.command is None and self.aliases:
            raise ValueError("aliases are of a command; an engine's model has one name, served-model-name")
        if self.command is not None and self.prefill:
            raise ValueError("prefill is of an engine of ours: a command says by itself what it splits")
        if not self.gpus and not self.floor:
            raise ValueError("a model without GPUs (gpus: 0) has nothing to share: give it a floor of 1 or more")
        return self


def component_of(name: str) -> str:
    """The component of a model's workers: `Qwen3-8B` -> `Qwen3_8B`. It never ends in `_<number>`."""
    plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "model"
    plain = re.sub(r"(?:_\d+)+$", lambda end: end[0].replace("_", ""), plain)
    return plain if plain[0].isalpha() else f"m{plain}"


def processor_of(component: str) -> str:
    """The Processor in front of a model's workers."""
    return f"{component}_Processor"


def router_of(component: str) -> str:
    """The Router of a model's workers, where it has one."""
    return f"{component}_Router"


def prefill_of(component: str) -> str:
    """The prefill workers of a model, where it has some."""
    return f"{component}_PrefillWorker"


def target_of(components: list[str]) -> str:
    """The graph of these models."""
    return f"{GRAPHS}:{SEPARATOR.join(('models', *components))}"


def components_of(sections: Mapping[str, Any]) -> list[str]:
    """The components of the graph that these models need, in their order; empty where none does."""
    models = sections.get(MODELS) or {}
    if commands_of(models):
        return []
    found = []
    for name, section in models.items():
        component = component_of(name)
        found += [component, *([router_of(component)] if _is_routed(section) else [])]
        if isinstance(section, Mapping) and section.get("prefill"):
            found.append(prefill_of(component))
    return found


def _is_routed(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("router") in _ROUTED


def expanded(sections: Mapping[str, Mapping[str, Any]], source: str) -> dict[str, dict[str, Any]]:
    """The sections of the services that the models become, without `Models`. Raises `ConfigError` naming the model."""
    given = sections[MODELS]
    if not given or len(given) > MODELS_MAX:
        raise ConfigError(f"{source}: {MODELS} has {len(given)} models; 1 to {MODELS_MAX} can be served", at=(MODELS,))
    commands = commands_of(given)
    if commands and len(commands) < len(given):
        engine = next(name for name in given if name not in commands)
        raise ConfigError(
            f"{source}: {MODELS}.{commands[0]} is a command and {MODELS}.{engine} an engine of ours: one Frontend "
            "serves commands only, or engines only; give all a command, or none",
            at=(MODELS, commands[0]),
        )
    found: dict[str, dict[str, Any]] = {}
    held: dict[str, dict[str, Any]] = {}
    for name, section in given.items():
        component = component_of(name)
        if component in found or component in ("Frontend", "Processor", "Router"):
            raise ConfigError(f"{source}: {MODELS}.{name}: another service is called {component}; rename the model")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{source}: {MODELS}.{name} holds a model's options, not {section!r}", at=(MODELS, name))
        model = validate_section(ModelSection, f"{source}: {MODELS}.{name}", section)
        served = model.served_model_name or name
        for each in (served, *model.aliases):
            if each in held:
                raise ConfigError(f"{source}: two models are named {each!r} in the API", at=(MODELS, name))
            held[each] = {"component": component, **model.model_dump(include=set(HELD))}
        if commands:
            found[component] = _server(model, (served, *model.aliases))
        else:
            found[component] = _worker(model, served, component)
            if model.prefill:
                found[prefill_of(component)] = _prefill_worker(model, served, component)
            found[processor_of(component)] = _before(model, served, _TO_PROCESSOR)
            if _is_routed(section):
                found[router_of(component)] = _before(model, served, _TO_ROUTER)
    frontend = {"served_model_name": list(held), "models": held}
    return {"Frontend": frontend, **found}


def commands_of(models: Mapping[str, Any]) -> list[str]:
    """The models of the section that are commands."""
    return [name for name, section in models.items() if isinstance(section, Mapping) and COMMAND in section]


HELD = ("max_wait_s", "max_held", "max_held_bytes")
"""Options that the Frontend reads."""


def _server(model: ModelSection, names: tuple[str, ...]) -> dict[str, Any]:
    """The section of a command. It must list these names, unless it has no list of models (`served-model-name`)."""
    named = {"must_serve": list(names)} if model.served_model_name is None else {"served_model_name": names[0]}
    return {
        "runtime": "http",
        "role": "aggregated",
        COMMAND: model.command,
        **({} if model.model is None else {"model": model.model}),
        **named,
        **(model.model_extra or {}),
        "ServiceArgs": _service_args(model),
    }


def _worker(model: ModelSection, served: str, component: str) -> dict[str, Any]:
    own = {key: value for key, value in (model.model_extra or {}).items() if key not in _NOT_TO_WORKER}
    apart = {"remote_prefill": True, "prefill_queue": component} if model.prefill else {}
    return {"model": model.model, "served_model_name": served, **apart, **own, "ServiceArgs": _service_args(model)}


def _prefill_worker(model: ModelSection, served: str, component: str) -> dict[str, Any]:
    more = model.model_extra or {}
    own = {key: value for key, value in more.items() if key in TO_PREFILL or key not in _NOT_TO_WORKER | TO_DECODE}
    args = _service_args(model)
    args |= {"workers": args["workers"] * model.prefill, "sharing": {"beside": component, "each": model.prefill}}
    return {
        "model": model.model,
        "served_model_name": served,
        "prefill_queue": component,
        **own,
        "ServiceArgs": args,
    }


def _service_args(model: ModelSection) -> dict[str, Any]:
    args = {
        "workers": model.floor if model.workers is None else model.workers,
        "resources": {"gpu": model.gpus},
        "envs": model.envs,
        "standby": model.standby,
        "start_deadline_s": model.start_deadline_s,
        "drain_deadline_s": model.drain_deadline_s,
        "sharing": model.model_dump(include=set(SharingArgs.model_fields)),
    }
    return {key: value for key, value in args.items() if value is not None}


def _before(model: ModelSection, served: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The section of its Processor, or of its Router: those of its keys, and the targets."""
    extra = model.model_extra or {}
    own = {key: extra[key] for key in (*keys, *_TO_ALL) if key in extra}
    return {"model": model.model, "served_model_name": served, **own}
