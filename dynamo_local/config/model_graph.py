"""From a plan for models to the configuration of a graph that serves them: YAML with comments, and the graph's name.

`dynamo serve --model … --write FILE` writes the text that it serves itself, through the same parser.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dynamo_local.config.loading import parse_value
from dynamo_local.config.models import GRAPHS, MODELS, component_of, target_of
from dynamo_local.errors import BadInput
from dynamo_local.sdk.service_config import underscored

START_DEADLINE_S, START_DEADLINE_LARGE_S = 900, 1800
LARGE_WEIGHTS_BYTES = 100e9
PORT = "{port:http}"
LISTEN = ("--host", "127.0.0.1", "--port", PORT)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model. `engines` with `gpus` GPUs each at the start; `prefill` of them prefill only. Beside other models it
    keeps at least `floor`.

    `options`: what its workers' section says beside model, name and engine. `command`: of a server that is no engine
    of ours.
    """

    model: str
    name: str | None
    engines: int
    gpus: int
    options: Mapping[str, Any] = field(default_factory=dict)
    prefill: int = 0
    envs: Mapping[str, str] = field(default_factory=dict)
    weights_bytes: int = 0
    command: tuple[str, ...] = ()
    floor: int = 1


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """All that is served behind one port. `engine`: sim, vllm, or None for commands. `host_gpus`: for `Host.gpus`.

    `planner`: the section `Planner`; None: no planner. `serve_args`: what vLLM's API reads. `reasons`: lines for the
    head of the file.
    """

    models: tuple[ModelPlan, ...]
    engine: str | None
    port: int
    api_key: str | None = None
    host_gpus: str | None = None
    planner: Mapping[str, Any] | None = None
    serve_args: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @property
    def target(self) -> str | None:
        """The graph that `dynamo serve` names; None for commands, which need none."""
        if self.engine is None:
            return None
        if len(self.models) > 1:
            return target_of([component_of(str(each.name)) for each in self.models])
        only = self.models[0]
        routed = "_router" if self.routed else ""
        return f"{GRAPHS}:{'disagg' if only.prefill else 'agg'}{routed}"

    @property
    def shares(self) -> bool:
        """Whether its models share the GPUs."""
        return len(self.models) > 1 and all(model.gpus for model in self.models)

    @property
    def routed(self) -> bool:
        """Whether a Router chooses among several workers by what each has cached."""
        return len(self.models) == 1 and (self.models[0].engines > 1 or self.planner is not None)


def graph_yaml(plan: GraphPlan, file: str = "FILE") -> str:
    """The configuration. `file` is named in its head."""
    target = f"{plan.target} " if plan.target is not None else ""
    head = [*plan.reasons, "", f"  dynamo serve {target}-f {file}"]
    parts = ["\n".join(f"# {line}".rstrip() for each in head for line in _printable(each))]
    for name, section, comment in _sections(plan):
        text = yaml.safe_dump({name: section}, sort_keys=False, width=110, allow_unicode=True).rstrip()
        parts.append(f"# {comment}\n{text}" if comment else text)
    return "\n\n".join(parts) + "\n"


def _printable(text: str) -> list[str]:
    """Its lines, at least one: a word of a command may hold several, and only a comment's first one begins with #."""
    lines = text.splitlines() or [""]
    return ["".join(char if char.isprintable() else "?" for char in line) for line in lines]


def _sections(plan: GraphPlan) -> Iterator[tuple[str, dict[str, Any], str]]:
    if plan.host_gpus is not None:
        simulated = plan.host_gpus.startswith("sim")
        comment = "Simulated devices; without this section: the machine's own." if simulated else "As `--gpus`."
        yield "Host", {"gpus": plan.host_gpus}, comment
    frontend: dict[str, Any] = {"port": plan.port}
    if plan.api_key is not None:
        frontend["api-key"] = plan.api_key
    if plan.engine is not None and len(plan.models) == 1 and plan.models[0].name is not None:
        frontend["served-model-name"] = plan.models[0].name
    yield "Frontend", frontend, "OpenAI's API, on 127.0.0.1 (docs/configuration.md#frontend)."
    if plan.engine is None and plan.shares:
        models = {str(model.name): _shared_command(model) for model in plan.models}
        yield MODELS, models, "Servers that share the GPUs: docs/models.md."
        return
    if plan.engine is None:
        for at, model in enumerate(plan.models):
            name = "Server" if at == 0 else f"Server{at + 1}"
            yield name, _command(model), "One server for each worker, each with its own port."
        return
    if len(plan.models) > 1:
        models = {str(model.name): _shared(plan, model) for model in plan.models}
        yield MODELS, models, "They share the GPUs: docs/models.md."
        return
    yield from _model(plan, plan.models[0])
    if plan.planner is not None:
        yield "Planner", dict(plan.planner), "Moves workers to keep the targets (docs/planner.md)."


def _command(model: ModelPlan) -> dict[str, Any]:
    vllm_like = _speaks_metrics(model.command)
    return {
        "command": list(model.command),
        "runtime": "http",
        "role": "aggregated",
        **({"model": model.model} if model.model else {}),
        **({} if vllm_like else {"metrics": None}),
        "ServiceArgs": {
            "workers": model.engines,
            "resources": {"gpu": model.gpus},
            "start-deadline-s": _start_deadline_s(model),
        },
    }


def _shared_command(model: ModelPlan) -> dict[str, Any]:
    """Its part of the section `Models`. A server that cannot be told its model's name is not asked for it."""
    named = {} if naming_option(model.command) else {"served-model-name": model.name}
    section = {**_command(model), **named, "gpus": model.gpus, "workers": model.engines, "floor": model.floor}
    section["start-deadline-s"] = section.pop("ServiceArgs")["start-deadline-s"]
    return {key: value for key, value in section.items() if key not in ("runtime", "role")}


def _start_deadline_s(model: ModelPlan) -> int:
    return START_DEADLINE_LARGE_S if model.weights_bytes > LARGE_WEIGHTS_BYTES else START_DEADLINE_S


def _speaks_metrics(command: Sequence[str]) -> bool:
    """vLLM and SGLang have metrics that tell their load."""
    return any(word in ("vllm", "sglang.launch_server") or word.endswith("/vllm") for word in command)


def _shared(plan: GraphPlan, model: ModelPlan) -> dict[str, Any]:
    """Its part of the section `Models`."""
    api = {"serve-args": dict(plan.serve_args)} if plan.serve_args and plan.engine == "vllm" else {}
    args = _service_args(plan, model, model.engines)
    args["gpus"] = args.pop("resources")["gpu"]
    return {
        "model": model.model,
        "engine": plan.engine,
        **args,
        "floor": model.floor,
        **model.options,
        **api,
    }


def _model(plan: GraphPlan, model: ModelPlan) -> Iterator[tuple[str, dict[str, Any], str]]:
    named = {"model": model.model, "served-model-name": model.name}
    # With targets and the engine's times the Router decides by both, which is its default then.
    by_times = plan.planner is not None and (plan.engine == "sim" or "profile-results-dir" in plan.planner)
    router = {"router": "kv"} if plan.routed and not by_times else {}
    api = {"serve-args": dict(plan.serve_args)} if plan.serve_args and plan.engine == "vllm" else {}
    yield "Processor", {**named, **router, **api}, "Chat template and tokenizer."
    if plan.routed:
        yield "Router", {**named, **router}, "Sends a prompt where most of it is cached (docs/routing.md)."
    worker = {**named, "engine": plan.engine, **model.options}
    apart = {"remote-prefill": True} if model.prefill else {}
    yield (
        "VllmWorker",
        {**worker, **apart, "ServiceArgs": _service_args(plan, model, model.engines - model.prefill)},
        "The engines. Other keys are the engine's own: `vllm serve --help=all`." if plan.engine == "vllm" else "",
    )
    if model.prefill:
        yield "PrefillWorker", {**worker, "ServiceArgs": _service_args(plan, model, model.prefill)}, ""


def _service_args(plan: GraphPlan, model: ModelPlan, workers: int) -> dict[str, Any]:
    return {
        "workers": workers,
        "resources": {"gpu": model.gpus},
        **({"envs": dict(model.envs)} if model.envs else {}),
        **({"start-deadline-s": _start_deadline_s(model)} if plan.engine == "vllm" else {}),
    }


# --- words of `vllm serve` -----------------------------------------------------------------------

SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}
API_OPTIONS = frozenset(
    {
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "enable_force_include_usage",
        "enable_prompt_tokens_details",
        "exclude_tools_when_tool_choice_none",
        "lora_modules",
        "response_role",
        "return_tokens_as_token_ids",
        "tool_call_parser",
        "tool_parser_plugin",
        "trust_request_chat_template",
    }
)
"""Options of `vllm serve` that its API reads, not its engine: they go to the Processor."""
INSTEAD = {
    "port": "--port, before the --",
    "api_key": "--api-key-file, before the --: a key on a command line is seen by all users of this host",
    "served_model_name": "--served-model-name, before the --",
    "model": "--model, before the --",
    "host": "--Frontend.host=ADDRESS, before the --",
}


def engine_options(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Words as `vllm serve` takes them: the engine's options, and those of its API; keys with underscores.

    Values are JSON where they can be read as JSON. Raises `BadInput` that names the word.
    """
    engine: dict[str, Any] = {}
    api: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, text = word.partition("=")
        name = SHORT.get(option) or (underscored(option[2:]) if option.startswith("--") and option != "--" else None)
        if not name:
            raise BadInput(f"{word!r} after -- is no option of `vllm serve`: write --option value")
        if name in INSTEAD:
            raise BadInput(f"{option} has no place after --: say {INSTEAD[name]}")
        values = [text] if equals else _values(rest)
        (api if name in API_OPTIONS else engine)[name] = _value(name, values)
    off = {name: value for name, value in engine.items() if name.startswith("no_") and value is True}
    for name in off:
        del engine[name]
        engine[name.removeprefix("no_")] = False
    return engine, api


def _values(rest: list[str]) -> list[str]:
    """The words up to the next option, taken from `rest`."""
    found: list[str] = []
    while rest and not (rest[0].startswith("-") and not _is_number(rest[0])):
        found.append(rest.pop(0))
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value(name: str, values: Sequence[str]) -> Any:
    if not values:
        return True
    read = [parse_value(value) for value in values]
    return read[0] if len(read) == 1 and name != "lora_modules" else read


# --- commands ------------------------------------------------------------------------------------

SGLANG = ("python", "-m", "sglang.launch_server", "--model-path", "{model}", *LISTEN, "--enable-metrics")
"""Its server. `--tp-size` and `--context-length` follow."""


TLS = ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-key-file", "--ssl-cert-file")
"""Options of servers for TLS, which is the Frontend's."""
NOT_HERE: Mapping[str, str] = {
    "--api-key": "say --api-key-file FILE before the --, and none here",
    "--uds": "its Frontend asks it on a port of 127.0.0.1; leave it out",
    **dict.fromkeys(
        TLS, "its Frontend asks it over plain HTTP on 127.0.0.1; say --Frontend.tls-cert and --Frontend.tls-key"
    ),
}
"""Options that a server's line cannot have here, and what to say."""


def naming_option(words: Sequence[str]) -> str | None:
    """The option that tells this server what its model is called in the API; None where none is known."""
    if _speaks_metrics(words):
        return "--served-model-name"
    return "--alias" if any(word.rpartition("/")[2].startswith("llama-server") for word in words) else None


def server_command(words: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """The line that a user has, as a command that listens where its Frontend expects it, and the port of that line.

    Raises `BadInput` where it cannot be told to listen there.
    """
    for option in (word.partition("=")[0] for word in words):
        if option in NOT_HERE:
            raise BadInput(f"{shlex.join(words[:2])} … {option}: {NOT_HERE[option]}")
    if any(PORT in word for word in words):
        return tuple(words), None
    if not (_speaks_metrics(words) or _names(words, "port")):
        raise BadInput(
            f"{words[0]}: where does it listen? Write '{PORT}' where its port stands, for example --port '{PORT}'"
        )
    kept, port = _without_address(words)
    has_host = _speaks_metrics(words) or _names(words, "host")
    more = [*LISTEN] if has_host else ["--port", PORT]
    if "sglang.launch_server" in words and "--enable-metrics" not in words:
        more.append("--enable-metrics")
    return (*kept, *more), port


def _names(words: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == f"--{option}" for word in words)


def _without_address(words: Sequence[str]) -> tuple[list[str], int | None]:
    """Without `--host` and `--port`, and the number of the latter."""
    kept: list[str] = []
    port: int | None = None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if option not in ("--host", "--port"):
            kept.append(word)
            continue
        value = value if equals else (rest.pop(0) if rest else "")
        if option == "--port":
            if not value.isdecimal() or not 0 < int(value) < 65536:
                raise BadInput(f"{option} {value}: a port is a number from 1 to 65535, or '{PORT}'")
            port = int(value)
    return kept, port


def gpus_of(words: Sequence[str]) -> int:
    """GPUs of one server, by the parallelism in its words."""
    total = 1
    for names in (
        ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
        ("--pipeline-parallel-size", "-pp", "--pp-size"),
        ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
    ):
        total *= _number(words, names) or 1
    return total


def _number(words: Sequence[str], names: Sequence[str]) -> int | None:
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in names:
            found = value if equals else (words[at + 1] if at + 1 < len(words) else "")
            if found.isdecimal() and int(found):
                return int(found)
    return None
