"""`dynamo serve --model …` and `dynamo serve -- COMMAND …`: reads models and GPUs, and decides what is served."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.config.model_folder import Model, find_model, read_folder, read_model
from dynamo_local.config.model_graph import (
    SGLANG,
    GraphPlan,
    ModelPlan,
    engine_options,
    gpus_of,
    graph_yaml,
    naming_option,
    server_command,
)
from dynamo_local.config.models import component_of
from dynamo_local.core.fits import (
    UTILISATION,
    Division,
    DoesNotFit,
    Fit,
    Gpus,
    Needs,
    divide,
    first_that_fit,
    fit,
    gb,
    kv_line,
    share,
    sum_line,
)
from dynamo_local.core.gpus import GpuDevice, GpuLedger
from dynamo_local.core.types import Missing
from dynamo_local.errors import BadInput, ConfigError, GpuError, StateError
from dynamo_local.system.gpus import open_inventory

if TYPE_CHECKING:
    from dynamo_local.state.schema import State

ENGINES = ("sim", "vllm", "sglang")
SIM_GPUS = "sim:8"
SIM_ENGINES = 2
"""Without --gpus the sim engine starts no more: each is a process, and none computes anything."""
SIM_BLOCK, SIM_BLOCKS_MAX = 64, 65_536
CHUNK_TOKENS = 2048
"""A prefill pass of so many tokens is compared with --itl."""
CPU_CONTEXT_BYTES = 2_000_000_000
CPU_MAX_LEN = 8192
CPU_REQUESTS = 4
CPU_SEQUENCES = 16
KV_OPTION = "kv_cache_memory_bytes"
WORKER = "VllmWorker"
"""The component of one model's workers."""
APART_BLOCK = 64
PORT_DEFAULT = 8000
PROFILE_FOLDER = "profile"
"""Where `dynamo profile` writes without --output."""


@dataclass(frozen=True, slots=True)
class ModelWords:
    """The words of `dynamo serve` that are about models. `behind`: those after `--`. `adopt`: GPUs of the namespace's
    own workers count as free."""

    models: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    engine: str | None = None
    gpus: str | None = None
    max_model_len: int | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    port: int | None = None
    api_key_file: Path | None = None
    names: tuple[str, ...] = ()
    namespace: str | None = None
    adopt: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """A decision: the graph's plan, and the sums of its models (empty for commands and on a CPU).

    `missing`: why it cannot be served from these folders, although it can be planned.
    """

    plan: GraphPlan
    fits: tuple[Fit, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def yaml(self) -> str:
        return graph_yaml(self.plan)

    def as_json(self) -> dict[str, Any]:
        """The decision in numbers. Bytes are of one GPU of an engine."""
        return {
            "graph": self.plan.target,
            "engine": self.plan.engine,
            "reasons": list(self.plan.reasons),
            "models": [
                {
                    "model": model.model,
                    "name": model.name,
                    "engines": model.engines,
                    "prefill_engines": model.prefill,
                    "gpus_per_engine": model.gpus,
                    **({} if not self.fits else _sums(self.fits[at])),
                }
                for at, model in enumerate(self.plan.models)
            ],
            "configuration": self.yaml,
        }


def _sums(found: Fit) -> dict[str, Any]:
    facts = found.needs.facts
    return {
        "max_model_len": found.max_len,
        "weights_bytes": found.weights_bytes,
        "working_bytes": found.working_bytes,
        "kv_room_bytes": found.kv_room_bytes,
        "kv_bytes_per_token": facts.token_bytes(found.tp),
        "window_kv_bytes_per_token": facts.token_bytes(found.tp, windows=True),
        "state_bytes_per_request": facts.state_bytes(found.tp),
        "kv_bytes_per_request": found.request_bytes,
        "requests_at_once": found.requests,
        "gpu_memory_bytes": found.gpus.memory_bytes,
    }


def decide(words: ModelWords, environ: Mapping[str, str]) -> Served:
    """The plan for these words. Raises `BadInput` errors, and changes nothing."""
    if not words.models:
        return _command_line(words, environ)
    _check_names(words)
    _check_tiny(words, words.engine)
    if words.engine is None or words.engine in ENGINES:
        for given in words.models:
            if not _tiny(given):
                find_model(given, environ)  # a model that is not here is the first thing to say
    if words.engine not in (None, "sim", "vllm"):
        return _servers(words, environ)
    host = _host(words, environ)
    engine = words.engine or host.engine(words)
    _check_tiny(words, engine)
    options, api = engine_options(words.behind)
    if engine == "sim" and words.behind:
        raise BadInput("words after -- go to the engine as `vllm serve` takes them, and the sim engine takes none")
    _check_parallelism(options)
    if engine == "vllm" and not host.devices:
        return _on_cpu(words, host, options, api, environ)
    return _on_gpus(words, host, engine, options, api, environ)


def _check_names(words: ModelWords) -> None:
    if words.names and len(words.names) != len(words.models):
        raise BadInput(
            f"--served-model-name is given {len(words.names)} times and --model {len(words.models)} times: "
            "name each model, or none"
        )
    if not all(name.strip() for name in words.names):
        raise BadInput("--served-model-name is empty; give a name, or leave it out")
    if len(words.models) > 1 and (words.ttft_ms or words.itl_ms):
        raise BadInput(
            "--ttft and --itl start the planner, which moves the workers of one model: give one --model, or no targets"
        )


def _check_tiny(words: ModelWords, engine: str | None) -> None:
    for given in words.models:
        if engine in ("vllm", "sglang") and _tiny(given):
            raise BadInput(f"{given} is the simulated engine's model, which has no weights: say --engine sim")


def _check_parallelism(options: Mapping[str, Any]) -> None:
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if options.get(name, 1) != 1:
            raise BadInput(
                f"--{name.replace('_', '-')}: this plan divides a model by tensor parallelism only; "
                "keep the plan with --write FILE, and divide it there"
            )


# --- the host --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Host:
    """Devices that are free; `missing`: why there are none. `option`: for `Host.gpus`."""

    devices: tuple[GpuDevice, ...]
    option: str | None
    missing: str = ""

    def engine(self, words: ModelWords) -> str:
        """The engine where the command line names none."""
        if _tiny(words.models[0]) or (words.gpus or "").startswith("sim"):
            return "sim"
        if self.devices or _cpu_vllm():
            return "vllm"
        raise BadInput(
            f"{self.missing}, and vLLM's CPU build is not installed; for simulated answers say "
            "--engine sim, to plan for GPUs that are not here --engine vllm --gpus sim:8 --dry-run"
        )

    def gpus(self) -> Gpus:
        sizes = [each.memory_total_bytes for each in self.devices]
        known = [size for size in sizes if not isinstance(size, Missing)]
        if not known or len(known) < len(sizes):
            raise GpuError("the NVIDIA driver does not tell how much memory the GPUs have; see `nvidia-smi`")
        return Gpus(len(known), min(known), self.devices[0].name)


def _tiny(model: str) -> bool:
    from dynamo_local.components.text.model import TINY_MODEL

    return model == TINY_MODEL


def _host(words: ModelWords, environ: Mapping[str, str]) -> _Host:
    option = words.gpus
    if option is None and (words.engine == "sim" or _tiny(words.models[0])):
        option = SIM_GPUS
    try:
        devices = _free(option, words, environ)
    except GpuError as error:
        if option is not None:
            raise
        return _Host((), None, str(error).removeprefix("GPUs are needed, but ").partition(";")[0])
    if not devices:
        raise GpuError("all GPUs are in use; `dynamo ls` and `nvidia-smi` show by whom")
    return _Host(devices, option)


def _free(option: str | None, words: ModelWords, environ: Mapping[str, str]) -> tuple[GpuDevice, ...]:
    """Devices that nobody uses; the namespace's own workers count as nobody with --adopt. Raises `GpuError`."""
    from dynamo_local.system.gpu_locks import GpuLocks, lock_folders
    from dynamo_local.system.gpu_pool import GpuPool

    inventory = open_inventory(option, environ)
    if inventory.simulated:
        return tuple(inventory.sample())
    namespace = words.namespace or "dynamo"
    with closing(GpuPool(namespace, inventory, GpuLocks(*lock_folders(environ)))) as pool:
        sample = pool.sample()
    ledger = GpuLedger.of(sample.devices, elsewhere=sample.elsewhere)
    free = {device.uuid for device in ledger.free} | (_adopted(namespace, environ) if words.adopt else set())
    return tuple(device for device in ledger.devices if device.uuid in free)


def _kept(namespace: str, environ: Mapping[str, str]) -> State | None:
    """The namespace's statefile. None where there is none, or none that can be read."""
    from dynamo_local.state.store import load
    from dynamo_local.system.paths import Paths

    try:
        return load(Paths.found(namespace, environ).statefile)
    except StateError:
        return None


def _adopted(namespace: str, environ: Mapping[str, str]) -> set[str]:
    """UUIDs of the devices that the namespace's workers hold."""
    state = _kept(namespace, environ)
    components = {} if state is None else state.components
    return {uuid for entry in components.values() for uuid in entry.resources.gpu_uuids or ()}


def _adopted_kv(words: ModelWords, environ: Mapping[str, str]) -> dict[str, int]:
    """KV bytes of the workers that --adopt takes back, by component. They hold their memory already."""
    state = _kept(words.namespace or "dynamo", environ) if words.adopt else None
    sections = {} if state is None else json.loads(state.environment.DYNAMO_SERVICE_CONFIG)
    found = {name: section.get(KV_OPTION) for name, section in sections.items()}
    return {name: kv for name, kv in found.items() if isinstance(kv, int)}


def _cpu_vllm() -> bool:
    """Whether vLLM is installed with a torch that knows no GPU."""
    from dynamo_local.engines.vllm.checks import is_installed

    try:
        return is_installed() and "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


# --- engines of ours on GPUs -----------------------------------------------------------------------


def _read(given: str, environ: Mapping[str, str], kv_dtype: str) -> Model:
    from dynamo_local.components.text.model import TINY_FOLDER

    return read_folder(TINY_FOLDER, given, kv_dtype) if _tiny(given) else read_model(given, environ, kv_dtype)


def _names(words: ModelWords, models: list[Model]) -> list[str]:
    return _distinct(list(words.names) or [model.given if _tiny(model.given) else model.name for model in models])


def _distinct(names: list[str]) -> list[str]:
    """The names of the models. Raises `BadInput` for two that are one in the API, or as components."""
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"two models are named {name!r}: give each a --served-model-name")
        if not name.isprintable():
            raise BadInput(f"the name {name!r} has characters that cannot be printed: give a --served-model-name")
    components: dict[str, str] = {}
    for name in names:
        other = components.setdefault(component_of(name).lower(), name)
        if other != name:
            raise BadInput(
                f"the models {other!r} and {name!r} differ in signs or case only, and their workers need other letters "
                "in their names: give each a --served-model-name"
            )
    return names


def _on_gpus(
    words: ModelWords,
    host: _Host,
    engine: str,
    options: dict[str, Any],
    api: dict[str, Any],
    environ: Mapping[str, str],
) -> Served:
    models = [_read(given, environ, str(options.get("kv_cache_dtype", "auto"))) for given in words.models]
    gpus, needs = host.gpus(), [_needs(model, words, options, engine) for model in models]
    fits = _fit_all(words.models, needs, gpus, turns=True)
    room = gpus.count
    if engine == "sim" and words.gpus is None:
        room = min(room, max(sum(each.tp for each in fits), SIM_ENGINES * fits[0].tp))
    sizes = [each.tp for each in fits]
    together = sum(sizes) <= room
    try:
        engines = share(room, sizes) if together or len(models) == 1 else first_that_fit(room, sizes)
    except DoesNotFit as error:
        raise GpuError(str(error)) from None
    division, profile = _division(words, engine, fits[0], engines[0], models[0], options)
    planner = _planner(words, room, profile, engine)
    names = _names(words, models)
    plans = tuple(
        ModelPlan(
            model=model.given if _tiny(model.given) else str(model.folder),
            name=name,
            engines=count,
            gpus=found.tp,
            options=_worker_options(engine, found, options, apart=division.prefill > 0),
            prefill=division.prefill if len(models) == 1 else 0,
            weights_bytes=model.weights_bytes or 0,
            floor=1 if together else 0,
        )
        for model, name, found, count in zip(models, names, fits, engines, strict=True)
    )
    plan = GraphPlan(
        models=plans,
        engine=engine,
        port=PORT_DEFAULT if words.port is None else words.port,
        api_key=_api_key(words),
        host_gpus=host.option,
        planner=planner,
        serve_args=_hyphened(api),
    )
    lines = _reasons(gpus.count, models, plan, fits, division, profile)
    return Served(replace(plan, reasons=tuple(lines)), tuple(fits), _without_tokenizer(models))


def _without_tokenizer(models: list[Model]) -> tuple[str, ...]:
    return tuple(
        f"{model.folder} has no tokenizer.json, without which no text can be read; download the whole model"
        for model in models
        if not (model.folder / "tokenizer.json").is_file()
    )


def _needs(model: Model, words: ModelWords, options: Mapping[str, Any], engine: str) -> Needs:
    if model.weights_bytes is None and engine != "sim":
        raise ConfigError(f"{model.folder} has no *.safetensors file, so its weights are missing; download it again")
    wanted = _whole(options, "max_model_len")
    if wanted is not None and words.max_model_len not in (None, wanted):
        raise BadInput(f"--max-model-len is {words.max_model_len} before -- and {wanted} after it; say it once")
    utilisation = options.get("gpu_memory_utilization", UTILISATION)
    if isinstance(utilisation, bool) or not isinstance(utilisation, int | float) or not 0 < utilisation <= 1:
        raise BadInput(f"--gpu-memory-utilization {utilisation}: a share of the memory, above 0 and at most 1")
    return Needs(
        facts=model.facts,
        weights_bytes=model.weights_bytes or 0,
        max_len=wanted if words.max_model_len is None else words.max_model_len,
        tp=_whole(options, "tensor_parallel_size"),
        batched=_whole(options, "max_num_batched_tokens"),
        utilisation=float(utilisation),
    )


def _whole(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"--{name.replace('_', '-')} {value}: a whole number above 0")
    return value


def _fit_all(given: tuple[str, ...], needs: list[Needs], gpus: Gpus, *, turns: bool = False) -> list[Fit]:
    """The engine of each model. Several models take fewer GPUs each where they would not all find room.

    `turns`: where they do not fit together, each may take all GPUs, one after the other.
    """
    each = replace(gpus, count=gpus.count - len(needs) + 1)
    if each.count < 1 and turns:
        each = gpus
    if each.count < 1:
        raise GpuError(f"{len(needs)} models need a GPU each, but {gpus.count} are free")

    def fitted(least: bool) -> list[Fit]:
        found = []
        for name, need in zip(given, needs, strict=True):
            if need.max_len is not None and need.max_len > need.facts.max_len:
                raise BadInput(f"--max-model-len {need.max_len}: {name} takes at most {need.facts.max_len:,} tokens")
            try:
                found.append(fit(need, each, least=least))
            except DoesNotFit as error:
                raise GpuError(f"{name} does not fit: {error}") from None
        return found

    found = fitted(False)
    return found if sum(one.tp for one in found) <= gpus.count else fitted(True)


def _worker_options(engine: str, found: Fit, options: Mapping[str, Any], *, apart: bool) -> dict[str, Any]:
    if engine == "sim":
        blocks = (found.kv_tokens or SIM_BLOCKS_MAX * SIM_BLOCK) // SIM_BLOCK
        needed = -(-found.max_len // SIM_BLOCK)
        per_token = found.needs.facts.token_bytes(1)
        sim = {"num-gpu-blocks": max(needed, min(blocks, SIM_BLOCKS_MAX))}
        return {"max-model-len": found.max_len, "sim": {**sim, "kv-bytes-per-token": max(1, per_token)}}
    ours = {"tensor_parallel_size"}  # follows resources.gpu
    given = {name: value for name, value in options.items() if name not in ours}
    block = {"block_size": APART_BLOCK} if apart else {}
    decided = {"max_model_len": found.max_len, "gpu_memory_utilization": found.needs.utilisation, **block}
    return _hyphened({**decided, **given})


def _hyphened(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in options.items()}


def _api_key(words: ModelWords) -> str | None:
    return None if words.api_key_file is None else f"file:{words.api_key_file.expanduser().absolute()}"


# --- targets ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Profile:
    """A profile that fits these engines, and its time of one prefill pass. None: there is none."""

    name: str | None = None
    chunk_ms: float | None = None


def _division(
    words: ModelWords, engine: str, found: Fit, engines: int, model: Model, options: Mapping[str, Any]
) -> tuple[Division, _Profile]:
    if len(words.models) > 1:
        return Division(0, engines, "aggregated: several models share the port"), _Profile()
    profile = _profile(engine, found, model) if words.ttft_ms or words.itl_ms else _Profile()
    obstacles = list(_obstacles(engine, found, options))
    return divide(engines, profile.chunk_ms, words.itl_ms, obstacles), profile


def _obstacles(engine: str, found: Fit, options: Mapping[str, Any]) -> list[str]:
    """Why this engine cannot hand KV over."""
    facts, why = found.needs.facts, list[str]()
    if engine == "vllm":
        if importlib.util.find_spec("nixl") is None:
            why.append("nixl, which moves KV between vLLM's engines, is not installed")
        if facts.states or facts.token_bytes(windows=True) or not facts.exact:
            why.append("the KV of such attention is not handed over here")
        if "kv_transfer_config" in options:
            why.append("--kv-transfer-config is given")
    return why


def _profile(engine: str, found: Fit, model: Model) -> _Profile:
    from dynamo_local.profile.interpolation import ProfileModel
    from dynamo_local.profile.reading import DEFAULT_PROFILE

    name = DEFAULT_PROFILE if engine == "sim" else _measured(found, model) or _shipped(found, model)
    if name is None:
        return _Profile()
    return _Profile(name, ProfileModel.load(name).prefill_s(0, CHUNK_TOKENS) * 1e3)


SHIPPED_FOR: Mapping[str, tuple[str, str]] = {
    "Qwen3-8B_h100_sxm_vllm_tp1": ("Qwen3-8B", "H100"),
    "dynamo_H200_TP1P_TP1D": ("Llama-3.1-8B-Instruct-FP8", "H200"),
}
"""Shipped profiles: the model's and the GPU's name; all are of one GPU."""


def _shipped(found: Fit, model: Model) -> str | None:
    for name, (of_model, gpu) in SHIPPED_FOR.items():
        if found.tp == 1 and gpu in found.gpus.name.upper() and model.name.rpartition("/")[2] == of_model:
            return name
    return None


def _measured(found: Fit, model: Model) -> str | None:
    """The folder that `dynamo profile` wrote here, if it is of this model on these GPUs."""
    from dynamo_local.profile.document import read_document

    folder = Path.cwd() / PROFILE_FOLDER
    try:
        document = read_document(folder)
    except ConfigError:
        return None
    if document is None or any(gpu.name != found.gpus.name for gpu in document.gpus):
        return None
    engines = document.engines.values()
    same = all(one.options.get("model") == str(model.folder) and one.gpus == found.tp for one in engines)
    return str(folder) if same and engines else None


def _planner(words: ModelWords, gpus: int, profile: _Profile, engine: str) -> dict[str, Any] | None:
    targets = {"ttft": words.ttft_ms, "itl": words.itl_ms}
    given = {name: value for name, value in targets.items() if value}
    if not given:
        return None
    named = {"profile-results-dir": profile.name} if profile.name is not None and engine != "sim" else {}
    return {**given, "max-gpu-budget": gpus, **named}


# --- reasons ---------------------------------------------------------------------------------------


def _reasons(
    count: int, models: list[Model], plan: GraphPlan, fits: list[Fit], division: Division, profile: _Profile
) -> list[str]:
    """At most ten lines."""
    gpus = fits[0].gpus
    lines = [f"GPUs: {count} free, {gpus.name}, {gb(gpus.memory_bytes)} each"]
    if len(models) > 1:
        lines += [_short(model, one, each) for model, one, each in zip(models, plan.models, fits, strict=True)][:7]
        if len(models) > 7:
            lines[-1] = f"… and {len(models) - 6} models more"
        return [
            *lines,
            _turns(plan, sum(each.tp for each in fits)),
            "One port, one /v1/models; `dynamo status` shows who has the GPUs",
        ]
    model, found, only = models[0], fits[0], plan.models[0]
    facts, weights = model.facts, model.weights_bytes
    known = "weights not known (no safetensors)" if weights is None else f"weights {gb(weights)}"
    quantised = f", {facts.quantisation}" if facts.quantisation else ""
    lines += [
        f"{only.name}: {facts.architecture}, {known}{quantised}, {facts.describe()}",
        f"One engine: {found.tp} GPU{'s' * (found.tp != 1)}: {sum_line(found)}",
        kv_line(found),
    ]
    if not found.whole:
        wanted = found.needs.max_len or facts.max_len
        lines.append(f"Requests of up to {found.max_len:,} tokens: the model's {wanted:,} do not fit")
    elif found.shorter is not None:
        length, fewer = found.shorter
        lines.append(
            f"{fewer} GPU{'s' * (fewer != 1)} would hold requests of {length:,} tokens: --max-model-len {length}"
        )
    routed = ", behind a Router that knows what each has cached" if plan.routed else ""
    roles = f"{division.prefill} prefill + {division.decode} decode" if division.prefill else f"{only.engines}"
    size = f" of {found.tp} GPU{'s' * (found.tp != 1)}"
    few = only.engines * found.tp < count and plan.engine == "sim"
    why_few = f"; simulated engines are processes of this machine, and --gpus sim:{count} starts more" if few else ""
    lines += [f"Engines: {roles}{size}{routed}{why_few}", f"{division.why[:1].upper()}{division.why[1:]}"]
    if plan.planner is not None:
        lines += _planner_lines(plan, profile)
    return lines


def _turns(plan: GraphPlan, needed: int) -> str:
    """Whether all models have an engine at once. `needed`: GPUs for one of each."""
    if all(one.floor for one in plan.models):
        return "Each keeps one engine; the other GPUs go where they are worth most"
    return (
        f"Together they need {needed} GPUs: a model may have none. Requests for it wait their turn, and its engine "
        "starts"
    )


def _short(model: Model, plan: ModelPlan, found: Fit) -> str:
    weights = "weights not known" if model.weights_bytes is None else f"weights {gb(model.weights_bytes)}"
    engines = f"{plan.engines} engine{'s' * (plan.engines != 1)} of {found.tp} GPU{'s' * (found.tp != 1)}"
    return (
        f"{plan.name}: {weights}, {engines}, {gb(found.kv_room_bytes)} for KV per GPU, "
        f"{found.requests:,} requests of {found.max_len:,} tokens at once"
    )


def _planner_lines(plan: GraphPlan, profile: _Profile) -> list[str]:
    section = plan.planner or {}
    targets = ", ".join(f"{name} {section[name]:g} ms" for name in ("ttft", "itl") if name in section)
    if profile.name is not None:
        return [f"Planner: on, for {targets}, with the profile {profile.name}"]
    return [
        f"Planner: on, for {targets}; no profile of these engines: it begins with the nearest, and learns from passes",
        f"To measure them: --write FILE, then dynamo profile {plan.target} -f FILE",
    ]


# --- vLLM without a GPU ----------------------------------------------------------------------------


def _on_cpu(
    words: ModelWords, host: _Host, options: dict[str, Any], api: dict[str, Any], environ: Mapping[str, str]
) -> Served:
    from dynamo_local.system.gpu_pool import host_free_bytes

    if not _cpu_vllm():
        raise GpuError(f"{host.missing}; vLLM needs a GPU, or its CPU build")
    if words.ttft_ms or words.itl_ms:
        raise BadInput("--ttft and --itl start the planner, which counts GPUs, and there is none here")
    models = [_read(given, environ, "float32") for given in words.models]
    names, free, adopted = _names(words, models), host_free_bytes(), _adopted_kv(words, environ)
    lines, plans = [f"GPUs: none ({host.missing}); vLLM's CPU build, in float32"], []
    threads = max(1, (os.cpu_count() or 1) // len(models))
    left = None if isinstance(free, Missing) else free
    for model, name in zip(models, names, strict=True):
        needs = _needs(model, words, options, "vllm")
        length = needs.max_len or min(model.facts.max_len, CPU_MAX_LEN)
        weights = needs.weights_bytes * 4 // model.facts.value_bytes
        request = model.facts.sequence_bytes(length, batched=length)
        kv = adopted.get(WORKER if len(models) == 1 else component_of(name))
        free_now = None if kv is not None else left
        if kv is None:
            kv = max(request, min(CPU_REQUESTS * request, (left or 0) // 4))
        total = weights + kv + CPU_CONTEXT_BYTES
        line = f"weights {gb(weights)} + KV {gb(kv)} + process {gb(CPU_CONTEXT_BYTES)} = {gb(total)}"
        if free_now is not None:
            if total > free_now:
                raise ConfigError(
                    f"{model.given} does not fit: {line} > {gb(free_now)} of free memory; take --max-model-len"
                )
            left = free_now - total
        lines.append(f"{name}: {model.facts.describe()}; requests of up to {length:,} tokens; {line}")
        plans.append(
            ModelPlan(
                model=str(model.folder),
                name=name,
                engines=1,
                gpus=0,
                options=_hyphened({**_cpu_options(length, kv), **options}),
                envs=_cpu_envs(threads),
                weights_bytes=needs.weights_bytes,
            )
        )
    port = PORT_DEFAULT if words.port is None else words.port
    plan = GraphPlan(tuple(plans), "vllm", port, _api_key(words), serve_args=_hyphened(api), reasons=tuple(lines[:10]))
    return Served(plan, missing=_without_tokenizer(models))


def _cpu_options(max_len: int, kv_bytes: int) -> dict[str, Any]:
    return {
        "max_model_len": max_len,
        "dtype": "float32",  # the CPU build's bfloat16 needs AMX
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        KV_OPTION: kv_bytes,
        "max_num_seqs": CPU_SEQUENCES,
    }


def _cpu_envs(threads: int) -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }


# --- servers that are commands ---------------------------------------------------------------------


def _servers(words: ModelWords, environ: Mapping[str, str]) -> Served:
    """`--engine sglang`, or a command with `{model}` and `{port:http}`."""
    assert words.engine is not None
    if words.ttft_ms or words.itl_ms:
        raise BadInput("--ttft and --itl need --engine vllm or sim: a command's passes are not known")
    sglang = words.engine == "sglang"
    template = SGLANG if sglang else _template(words.engine)
    host = _host(words, environ)
    count = len(host.devices)
    fits: list[Fit] = []
    if sglang and host.devices:
        models = [_read(given, environ, "auto") for given in words.models]
        needs = [_needs(model, words, {}, "sglang") for model in models]
        fits = _fit_all(words.models, needs, host.gpus())
        sizes = [each.tp for each in fits]
    else:
        sizes = [gpus_of((*template, *words.behind)) if count else 0] * len(words.models)
    several = len(sizes) > 1 and all(sizes)
    together = sum(sizes) <= count
    try:
        engines = share(count, sizes) if count and (together or not several) else first_that_fit(count, sizes)
    except DoesNotFit as error:
        raise GpuError(str(error)) from None
    names = _command_names(words) if several or words.names else [None] * len(sizes)
    plans = []
    for at, (given, name) in enumerate(zip(words.models, names, strict=True)):
        more: tuple[str, ...] = ()
        if fits:
            more = ("--tp-size", str(fits[at].tp), "--context-length", str(fits[at].max_len))
        option = naming_option(template)
        if option is not None and name is not None and option not in (*template, *words.behind):
            more += (option, name)
        command, _ = server_command((*template, *more, *words.behind))
        floor = int(together) if several else 1
        plans.append(ModelPlan(_place(given), name, engines[at], sizes[at], command=command, floor=floor))
    lines = [f"{plan.model}: {plan.engines} × {shlex.join(plan.command)}" for plan in plans]
    lines += [f"{one}: {sum_line(each)}" for one, each in zip(words.models, fits, strict=False)]
    plan = _commands(words, tuple(plans), lines, host.option)
    if several:
        plan = replace(plan, reasons=(*plan.reasons[:-1], _turns(plan, sum(sizes)), plan.reasons[-1]))
    return Served(plan, tuple(fits))


def _command_names(words: ModelWords) -> list[str]:
    """Each model's name in the API: the command line's, or that of its folder or file."""
    return _distinct(list(words.names) or [Path(given).name.removesuffix(".gguf") for given in words.models])


def _place(given: str) -> str:
    """A folder or a file as a whole path; a name as it is."""
    path = Path(given).expanduser()
    return str(path.absolute()) if path.exists() else given


def _template(engine: str) -> tuple[str, ...]:
    try:
        template = tuple(shlex.split(engine))
    except ValueError as error:
        raise BadInput(f"--engine {engine!r} cannot be split into words: {error}") from None
    if len(template) < 2:
        raise BadInput(
            f"--engine {engine!r} is none of {', '.join(ENGINES)}, and no command: write for example "
            "--engine 'llama-server -m {model} --host 127.0.0.1 --port {port:http}'"
        )
    return template


def _command_line(words: ModelWords, environ: Mapping[str, str]) -> Served:
    """`dynamo serve -- vllm serve MODEL …`"""
    command, port = server_command(words.behind)
    if words.max_model_len or words.ttft_ms or words.itl_ms or words.names or words.engine:
        raise BadInput(
            "with a command after --, say --max-model-len and --served-model-name in the command; --engine, --ttft "
            "and --itl need --model"
        )
    words = replace(words, port=words.port if words.port is not None else port)
    try:
        devices = _free(words.gpus, words, environ)
    except GpuError:
        if words.gpus is not None:
            raise
        devices = ()
    gpus = gpus_of(command)
    if 0 < len(devices) < gpus:
        raise GpuError(f"the command needs {gpus} GPUs; free: {len(devices)}")
    plan = ModelPlan("", None, 1, gpus if devices else 0, command=command)
    lines = [f"One worker, {plan.gpus} GPU{'s' * (plan.gpus != 1)}: {shlex.join(command)}"]
    return Served(_commands(words, (plan,), lines, words.gpus))


def _commands(words: ModelWords, plans: tuple[ModelPlan, ...], lines: list[str], gpus: str | None) -> GraphPlan:
    return GraphPlan(
        models=plans,
        engine=None,
        port=PORT_DEFAULT if words.port is None else words.port,
        api_key=_api_key(words),
        host_gpus=gpus,
        reasons=(*lines[:9], "A worker that drains finishes its streams; one that dies is started again."),
    )
