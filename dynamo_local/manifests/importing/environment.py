"""The variables of a container as those of a command on this host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dynamo_local.commands.dynamo_1x.env import HTTP_PORT, OWNED, PORT_VARIABLES
from dynamo_local.core.secrets import allowed_env
from dynamo_local.kubernetes.model import Container, EnvVar, NamedRef
from dynamo_local.manifests.exporting.environment import OF_THE_HOST, POD_IP, POD_NAME
from dynamo_local.manifests.importing.documents import Documents
from dynamo_local.manifests.notes import Kind, Note
from dynamo_local.sdk.checks import SET_BY_SERVE

_REFERENCE = re.compile(r"\$(\$)?\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_IN_CLUSTER = re.compile(r"\.svc\b")
_SERVERS = ("ETCD_", "NATS_", "KUBERNETES_")
_DISCOVERY = ("DYN_DISCOVERY_BACKEND", "DYN_KUBE_DISCOVERY_MODE", "DYN_STORE_KV")
WATCHER = "{watcher}"
_PER_WORKER = {POD_IP: "127.0.0.1", POD_NAME: WATCHER}


@dataclass(slots=True)
class Variables:
    """`envs` are of the section, `brought` stand before the command (each worker has its own), `passed` are to come
    from the shell. `known` is what `$(NAME)` in a word stands for."""

    envs: dict[str, str] = field(default_factory=dict)
    brought: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=lambda: {"DYN_NAMESPACE": "{namespace}", "POD_NAME": WATCHER})
    http_port: int | None = None
    notes: list[Note] = field(default_factory=list)


def host_variables(of_all: Iterable[EnvVar], container: Container, where: str, documents: Documents) -> Variables:
    """Those of all components, and the container's own over them."""
    found = Variables()
    merged = {variable.name: variable for variable in (*of_all, *(container.env or ()))}
    for variable in merged.values():
        _take(variable, f"{where}.env.{variable.name}", documents, found)
    for source in container.env_from or ():
        _take_all(source.secret_ref, source.config_map_ref, where, documents, found)
    return found


def expanded(text: str, known: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """`$(NAME)` as Kubernetes fills it in, and the names that are not known; `$$(` is `$(`."""
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        if match[2] not in known:
            unknown.append(match[2])
            return match[0]
        return known[match[2]]

    return _REFERENCE.sub(value, text), tuple(unknown)


def _take(variable: EnvVar, where: str, documents: Documents, found: Variables) -> None:
    name, source = variable.name, variable.value_from
    if source is not None and source.secret_key_ref is not None:
        return _pass(
            name, f"the key {source.secret_key_ref.key} of the Secret {source.secret_key_ref.name}", where, found
        )
    value: str | None = variable.value or ""
    if source is not None:
        ref = source.config_map_key_ref
        in_pod = ((source.model_extra or {}).get("fieldRef") or {}).get("fieldPath")
        value = documents.config_value(ref.name, ref.key) if ref is not None else _PER_WORKER.get(str(in_pod))
        if value is None:
            what = f"the key {ref.key} of the ConfigMap {ref.name}, which is not in this file" if ref else in_pod
            found.notes.append(Note(Kind.LEFT_OUT, where, f"its value is {what or 'of the pod'}"))
            return None
    value, unknown = expanded(value or "", found.known)
    if unknown:
        found.notes.append(Note(Kind.LEFT_OUT, where, f"its value needs {', '.join(unknown)}, which is not known here"))
        return None
    found.known[name] = value
    return place(name, value, where, found)


def place(name: str, value: str, where: str, found: Variables) -> None:
    """A variable with a value: into the section, before the command, or nowhere."""
    if name == PORT_VARIABLES[HTTP_PORT] and value.isdecimal():
        found.http_port = int(value)
    elif name in OWNED or name in SET_BY_SERVE:
        found.notes.append(Note(Kind.LEFT_OUT, where, "dynamo serve sets it, for each worker its own"))
    elif name.startswith(_SERVERS) or _IN_CLUSTER.search(value):
        found.notes.append(Note(Kind.LEFT_OUT, where, f"{value} is a server of the cluster"))
    elif name in OF_THE_HOST:
        found.notes.append(Note(Kind.LEFT_OUT, where, "dynamo serve gives each worker its GPUs"))
    elif name in _DISCOVERY:
        found.notes.append(Note(Kind.LEFT_OUT, where, "the processes of a host find one another by its etcd"))
    elif value == WATCHER:
        found.brought[name] = value
    elif name.endswith("_PORT") and value.isdecimal():
        # Pods may all have the same: on one host each worker needs its own.
        found.brought[name] = f"{{port:{name.removesuffix('_PORT').lower().replace('_', '-')}}}"
        found.notes.append(Note(Kind.CHANGED, where, f"any free port for each worker, in place of {value}"))
    else:
        found.envs[name] = value


def _take_all(
    secret: NamedRef | None, config_map: NamedRef | None, where: str, documents: Documents, found: Variables
) -> None:
    """All keys of a Secret, or of a ConfigMap."""
    from_ = f"{where}.envFrom"
    if secret is not None:
        text = (
            f"all keys of the Secret {secret.name}: export those that are needed before dynamo serve "
            "(HF_* reach the workers, others where Host.pass-env names them)"
        )
        found.notes.append(Note(Kind.SECRET, from_, text))
        return
    name = "" if config_map is None else config_map.name
    data = (documents.config_maps or {}).get(name)
    if data is None:
        found.notes.append(Note(Kind.LEFT_OUT, from_, f"the ConfigMap {name} is not in this file"))
        return
    for key, value in data.items():
        if key not in found.known and isinstance(value, str):
            found.known[key] = value
            place(key, value, f"{from_}.{key}", found)


def _pass(name: str, what: str, where: str, found: Variables) -> None:
    if not allowed_env({name: ""}):
        found.passed.append(name)
    found.notes.append(Note(Kind.SECRET, where, f"{what}: export {name} before dynamo serve"))
