"""What runs for a service of this host, as one of Dynamo 1.x's processes: its words, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dynamo_local.commands.config import CommandConfig
from dynamo_local.core.life.roles import ROLES
from dynamo_local.core.types import Role, ServiceSpec
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.program import FRONTEND, MODE, module_of, without_env
from dynamo_local.manifests.exporting.servers import as_worker, is_vllm_server
from dynamo_local.manifests.notes import Kind, Note, left_out

if TYPE_CHECKING:
    from dynamo_local.engines.vllm.options import VllmOptions

_MODES = ("round-robin", "random", "kv")
"""Of Dynamo 1.x's frontends, whatever their version."""
_COMMAND_KEYS = ("command", "role", "runtime", "model", "ports")
_ENGINE_KEYS = ("model", "served_model_name", "max_model_len", "engine")
_OURS = "an option of this project alone; Dynamo 1.x's process has none like it"
_REASONS = {
    "health_url": "the operator's probes ask Dynamo's processes",
    "settle_s": "the operator's probes ask Dynamo's processes",
    "health_bound_s": "the operator's probes decide when a pod is started anew",
    "stop_timeout_s": "a pod has terminationGracePeriodSeconds (ServiceArgs.drain-deadline-s)",
    "sleep_hook": "there are no sleeping workers on Kubernetes",
    "wake_hook": "there are no sleeping workers on Kubernetes",
    "host": "the operator says where a frontend listens",
    "port": "the operator says where a frontend listens: port 8000 of its Service",
    "api_key": "Dynamo's frontend asks for no key: put a gateway with authentication in front of it",
    "tls_certificate": "a gateway or an ingress in front of the frontend terminates TLS",
    "remote_prefill": "in Dynamo 1.x the frontend has prompts prefilled elsewhere",
    "conditional_disagg": "in Dynamo 1.x the frontend has prompts prefilled elsewhere",
}


@dataclass(frozen=True, slots=True)
class Process:
    """The words, placeholders as on this host, variables that stood before them (`env A=b`), and its fixed ports."""

    words: tuple[str, ...]
    brought: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class NoProcess:
    """There is none. `refuses`: without it the graph would be another one."""

    reason: str
    refuses: bool


def process_of(service: ServiceSpec, settings: Any, router: str | None) -> Process | NoProcess:
    """What runs for the service on Kubernetes. `settings` is its validated section, `router` the graph's policy."""
    if isinstance(settings, CommandConfig):
        return _of_command(service, settings)
    if hasattr(settings, "vllm_options"):
        return _of_engine(service, settings)
    if service.role is Role.FRONTEND:
        return _frontend(service, router)
    if ROLES[service.role].computes:
        return NoProcess("a worker of this graph's own code: Dynamo's images do not have it", refuses=True)
    return NoProcess("Dynamo 1.x's frontend does this work (or it is this graph's own code)", refuses=False)


def _of_command(service: ServiceSpec, settings: CommandConfig) -> Process | NoProcess:
    unread = [key for key in service.config if key not in (*_COMMAND_KEYS, "served_model_name")]
    notes = left_out(service.name, _REASONS, unread, _OURS)
    words, brought = without_env(settings.words)
    if (module_of(words) or "").startswith("dynamo."):
        return Process(words, brought, settings.model, settings.ports, notes)
    if is_vllm_server(words) and ROLES[service.role].computes:
        named = getattr(settings, "served_model_name", None)
        worker, more = as_worker(words, service.role, service.name, named)
        return Process(worker, brought, settings.model, settings.ports, (*notes, *more))
    known = "Dynamo 1.x's processes (python -m dynamo.…) and `vllm serve` carry over, this program does not"
    return NoProcess(known, refuses=service.role is not Role.OTHER)


def _of_engine(service: ServiceSpec, settings: Any) -> Process | NoProcess:
    if settings.engine_name != "vllm":
        why = f"its engine is {settings.engine_name}: a graph for a cluster computes with vllm (engine: vllm, model: …)"
        return NoProcess(why, refuses=True)
    options: VllmOptions = settings.vllm_options(service.resources.gpu)
    mode = {"producer": [MODE, "prefill"], "consumer": [MODE, "decode"]}.get(options.transfer, [])
    try:
        # Dynamo's vLLM workers both give KV and take it.
        words = replace(options, transfer="both" if mode else "none").words()
    except ConfigError as error:
        return NoProcess(str(error), refuses=True)
    ours = [key for key in service.config if key in type(settings).model_fields and key not in _ENGINE_KEYS]
    notes = left_out(service.name, _REASONS, ours, _OURS)
    # `--model=X`: two words, as in Dynamo's own manifests. A model's name begins with no hyphen.
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--model=") else [word])]
    return Process(("python3", "-m", "dynamo.vllm", *apart, *mode), model=options.model, notes=notes)


def _frontend(service: ServiceSpec, router: str | None) -> Process:
    mode = router if router in _MODES else "round-robin" if router is None else "kv"
    notes = list(left_out(service.name, _REASONS, (key for key in service.config), _OURS))
    if router not in (mode, None):
        notes.append(Note(Kind.CHANGED, service.name, f"router {router} is --router-mode {mode} of Dynamo's frontend"))
    return Process(("python3", "-m", FRONTEND, "--router-mode", mode), notes=tuple(notes))
