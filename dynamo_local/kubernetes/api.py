"""The Kubernetes API server as the planner uses it: a graph, its scaling adapters, a lease. Errors are typed.

`Transport` is the seam: the official client (extra `kubernetes`) in a pod, a small API server in tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import ValidationError

from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError, DynamoError, InfraUnavailable, how_to_install
from dynamo_local.kubernetes.graph import Adapter, Counts, GraphComponent, ObservedGraph, PatchGraph, ScaleAdapter
from dynamo_local.kubernetes.manifests import (
    ADAPTER_PLURAL,
    GPU_RESOURCE,
    GRAPH_PLURAL,
    METADATA_PLURAL,
    V1ALPHA1,
    V1BETA1,
    Component,
    ComponentStatus,
    ComponentType,
    Container,
    Graph,
    GraphV1Beta1,
    ModelRef,
    Multinode,
    PodSpec,
    Quantity,
    Service,
    ServiceResources,
    WrongKind,
    adapter_name,
    mode_of,
    option,
    read_graph,
)
from dynamo_local.system.executors import CallOverdue, DaemonExecutor

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP status with its object (for an error: a `Status`). The object is empty if the body was no JSON."""

    status: int
    body: Mapping[str, Any]


class Transport(Protocol):
    """One request to the API server."""

    async def request(self, method: str, path: str, body: Any = None, *, content: str = JSON) -> Answer:
        """Has a deadline of its own. Raises `ApiAway` if there is no answer."""
        ...


class ApiAway(InfraUnavailable):
    """The API server cannot be reached, or did not answer in time. A write may have arrived."""

    code = "api_away"


class ApiRefused(DynamoError):
    """The API server refused the request."""

    code: ClassVar[str] = "api_refused"


class Conflict(ApiRefused):
    """The object has changed since it was read (409), or a test of the patch failed (422)."""

    code = "conflict"
    retryable = True


class Forbidden(ApiRefused):
    """The service account may not do that (403), or is unknown (401)."""

    code = "forbidden"


class NotThere(ApiRefused):
    """The object does not exist."""

    code = "not_there"


class KubeApi:
    """One graph in one namespace. `version` is the server's, once the graph was read."""

    def __init__(self, transport: Transport, namespace: str, name: str) -> None:
        self._transport = transport
        self.namespace = namespace
        self.name = name
        self._version = ""

    # --- the graph ---------------------------------------------------------------------------------

    async def graph(self) -> ObservedGraph:
        """The graph, and the adapters of its components. Raises `NotThere`, `Forbidden`, `ApiAway`."""
        seen = await self._document()
        adapters: dict[str, Adapter] = {}
        for one in (one for one in seen.components if one.by_adapter and one.role is not None):
            try:
                adapters[one.name] = await self._adapter(seen, one.name)
            except NotThere:
                continue  # reported by a write: nothing is written past a missing adapter
        return replace(seen, adapters=adapters)

    async def _document(self) -> ObservedGraph:
        versions = (self._version,) if self._version else (V1BETA1, V1ALPHA1)
        for version in versions:
            answer = await self._transport.request("GET", self._path(version, GRAPH_PLURAL, self.name))
            if answer.status == 404 and answer.body.get("reason") != "NotFound" and version != versions[-1]:
                continue  # the server does not have this version
            try:
                seen = read_observed(_checked(answer, f"{GRAPH_PLURAL}/{self.name}", self.namespace))
            except (WrongKind, ValidationError) as error:
                raise ApiRefused(f"{GRAPH_PLURAL}/{self.name} cannot be read: {error}") from None
            self._version = version
            return seen
        raise AssertionError("unreachable")

    async def patch(self, write: PatchGraph) -> None:
        """Raises `Conflict` if the graph has changed since."""
        path = self._path(self._version, GRAPH_PLURAL, self.name)
        answer = await self._transport.request("PATCH", path, list(write.operations), content=JSON_PATCH)
        _checked(answer, f"{GRAPH_PLURAL}/{self.name}", self.namespace)

    # --- scaling adapters --------------------------------------------------------------------------

    async def _adapter(self, seen: ObservedGraph, component: str) -> Adapter:
        name = adapter_name(seen.name, component)
        answer = await self._transport.request("GET", self._scale(name))
        scale = _checked(answer, f"{ADAPTER_PLURAL}/{name}", self.namespace)
        return Adapter(name, int((scale.get("spec") or {}).get("replicas", 0)), scale["metadata"]["resourceVersion"])

    async def scale(self, write: ScaleAdapter) -> None:
        """Raises `Conflict` if somebody else has scaled it since."""
        adapter = write.adapter
        body = {"metadata": {"resourceVersion": adapter.resource_version}, "spec": {"replicas": write.replicas}}
        answer = await self._transport.request("PATCH", self._scale(adapter.name), body, content=MERGE_PATCH)
        _checked(answer, f"{ADAPTER_PLURAL}/{adapter.name}", self.namespace)

    def _scale(self, name: str) -> str:
        return f"{self._path(self._version, ADAPTER_PLURAL, name)}/scale"

    # --- workers -----------------------------------------------------------------------------------

    async def worker_metadata(self) -> tuple[Mapping[str, Any], ...]:
        """The `DynamoWorkerMetadata` objects of the namespace. Raises `NotThere` if the cluster has no such kind."""
        path = f"/apis/{V1ALPHA1}/namespaces/{self.namespace}/{METADATA_PLURAL}"
        answer = _checked(await self._transport.request("GET", path), METADATA_PLURAL, self.namespace)
        return tuple(one for one in answer.get("items") or () if isinstance(one, dict))

    # --- the lease ---------------------------------------------------------------------------------

    async def lease(self, name: str) -> Mapping[str, Any]:
        """Raises `NotThere`."""
        return _checked(await self._transport.request("GET", self._leases(name)), f"leases/{name}", self.namespace)

    async def create_lease(self, lease: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises `Conflict` if another planner was quicker."""
        answer = await self._transport.request("POST", self._leases(), lease)
        return _checked(answer, f"leases/{lease['metadata']['name']}", self.namespace)

    async def replace_lease(self, lease: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises `Conflict` if another planner has written it since."""
        name = lease["metadata"]["name"]
        answer = await self._transport.request("PUT", self._leases(name), lease)
        return _checked(answer, f"leases/{name}", self.namespace)

    def _leases(self, name: str = "") -> str:
        where = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
        return f"{where}/{name}" if name else where

    def _path(self, version: str, plural: str, name: str) -> str:
        return f"/apis/{version}/namespaces/{self.namespace}/{plural}/{name}"


def _checked(answer: Answer, what: str, namespace: str) -> Mapping[str, Any]:
    if answer.status < 300:
        return answer.body
    message = answer.body.get("message") or f"status {answer.status}"
    where = f"{what} in namespace {namespace}"
    if answer.status == 404:
        raise NotThere(f"there is no {where}: {message}")
    if answer.status in (401, 403):
        raise Forbidden(f"the planner may not use {where}: {message}")
    if answer.status in (409, 422):
        raise Conflict(f"{where} has changed meanwhile: {message}")
    if answer.status == 429 or answer.status >= 500:
        raise ApiAway(f"the API server cannot serve {where} now: {message}")
    raise ApiRefused(f"the API server refuses {where}: {message}")


def all_texts(texts: Iterable[str]) -> str:
    """Several faults as one text, a line each."""
    return "\n".join(f"  - {text}" for text in texts)


WORKERS = frozenset({"worker", "prefill", "decode"})
MODEL_OPTIONS = ("--served-model-name", "--model", "--model-path", "--model-name")


def read_observed(raw: Mapping[str, Any]) -> ObservedGraph:
    """The graph of this document. Raises `WrongKind` and pydantic's `ValidationError`."""
    graph = read_graph(raw)
    meta, status = graph.metadata, graph.status
    rolling = None if status is None else status.rolling_update
    return ObservedGraph(
        name=meta.name or "",
        api_version=graph.api_version,
        resource_version=meta.resource_version or "",
        generation=meta.generation or 0,
        observed=None if status is None else status.observed_generation,
        state="" if status is None else str(status.state),
        components=_with_roles(_components(graph)),
        rolling=rolling is not None and rolling.phase in ("Pending", "InProgress"),
        deleting=meta.deletion_timestamp is not None,
        trouble="" if status is None else _trouble(status.conditions or ()),
    )


def _trouble(conditions: Iterable[Any]) -> str:
    unready = (one for one in conditions if one.type == "Ready" and one.status != "True")
    return next(((one.message or one.reason or "") for one in unready), "")


def _components(graph: Graph) -> tuple[GraphComponent, ...]:
    if isinstance(graph, GraphV1Beta1):
        counts = (graph.status and graph.status.components) or {}
        return tuple(_component(n, one, counts.get(one.name)) for n, one in enumerate(graph.spec.components))
    statuses = (graph.status and graph.status.services) or {}
    return tuple(_service(name, one, statuses.get(name)) for name, one in graph.spec.services.items())


def _component(n: int, one: Component, status: ComponentStatus | None) -> GraphComponent:
    pod = None if one.pod_template is None else one.pod_template.spec
    gpus, claims = _gpus_of_pod(pod)
    words = _words(one.main)
    return GraphComponent(
        name=one.name,
        pointer=f"/spec/components/{n}",
        listed=True,
        kind=str(one.type or ""),
        role=None,
        replicas=one.replicas,
        by_adapter=one.scaling_adapter is not None,
        gpus=_per_replica(gpus, one.multinode, status),
        claims=claims,
        model=_model(words, one.model_ref),
        vllm="dynamo.vllm" in words,
        disaggregation=mode_of(words),
        counts=_counts(status),
    )


def _service(name: str, one: Service, status: ComponentStatus | None) -> GraphComponent:
    gpus, claims = _gpus_of_service(one.resources)
    if gpus is None:
        main = () if one.main is None else (one.main,)
        gpus = _gpus_of_containers((*main, *(() if one.extra_pod_spec is None else one.extra_pod_spec.containers)))
    words = _words(one.main)
    return GraphComponent(
        name=name,
        pointer=f"/spec/services/{name.replace('~', '~0').replace('/', '~1')}",
        listed=False,
        kind=one.sub_component_type or one.component_type or "",
        role=None,
        replicas=one.replicas,
        by_adapter=one.scaling_adapter is not None and bool(one.scaling_adapter.enabled),
        gpus=_per_replica(gpus, one.multinode, status),
        claims=claims or bool(one.extra_pod_spec and getattr(one.extra_pod_spec, "resourceClaims", None)),
        model=_model(words, one.model_ref),
        vllm="dynamo.vllm" in words,
        disaggregation=mode_of(words),
        counts=_counts(status),
    )


def _with_roles(components: tuple[GraphComponent, ...]) -> tuple[GraphComponent, ...]:
    workers = [one for one in components if one.kind in WORKERS]
    alone = len(workers) == 1
    return tuple(replace(one, role=_role(one, alone)) if one in workers else one for one in components)


def _role(one: GraphComponent, alone: bool) -> Role | None:
    role = one.kind if one.kind != ComponentType.WORKER else one.disaggregation or ""
    name = one.name.lower()
    if role == "prefill" or (not _is_role(role) and "prefill" in name):
        return Role.PREFILL
    if alone and role != "decode":
        return Role.AGGREGATED
    if role == "decode" or "decode" in name or not alone:
        return Role.DECODE
    return Role.AGGREGATED


def _is_role(word: str) -> bool:
    """Whether a word names one of the two roles."""
    return word in ("prefill", "decode")


def _words(main: Container | None) -> tuple[str, ...]:
    """The command's words, also if it is one string for a shell."""
    if main is None:
        return ()
    return tuple(part for word in (*(main.command or ()), *(main.args or ())) for part in word.split())


def _model(words: Sequence[str], named: ModelRef | None) -> str | None:
    given = (option(words, name) for name in MODEL_OPTIONS)
    return next(filter(None, given), None if named is None else named.name)


def _per_replica(gpus: int | None, multinode: Multinode | None, status: ComponentStatus | None) -> int | None:
    """The operator's number wins, because it knows resource claims, too."""
    if status is not None and status.gpus_per_replica is not None:
        return status.gpus_per_replica
    return None if gpus is None else gpus * (1 if multinode is None else multinode.node_count)


def _gpus_of_pod(pod: PodSpec | None) -> tuple[int | None, bool]:
    if pod is None:
        return None, False
    return _gpus_of_containers(pod.containers), bool(getattr(pod, "resourceClaims", None))


def _gpus_of_containers(containers: Iterable[Container]) -> int | None:
    found = [
        number
        for container in containers
        if container.resources is not None
        for number in (_gpus({**(container.resources.requests or {}), **(container.resources.limits or {})}),)
        if number is not None
    ]
    return sum(found) if found else None


def _gpus(resources: Mapping[str, Quantity]) -> int | None:
    """Devices of NVIDIA's plugin: whole ones, and its slices (`nvidia.com/mig-1g.10gb`)."""
    found = [_whole(many) for name, many in resources.items() if name == GPU_RESOURCE or _is_slice(name)]
    known = [number for number in found if number is not None]
    return sum(known) if known else None


def _is_slice(name: str) -> bool:
    return name.startswith("nvidia.com/mig-")


def _gpus_of_service(resources: ServiceResources | None) -> tuple[int | None, bool]:
    if resources is None:
        return None, False
    claims = bool(getattr(resources, "claims", None))
    for item in (resources.limits, resources.requests):
        if item is None:
            continue
        if (number := _whole(item.gpu)) is not None:
            return number, claims
        if (number := _gpus(item.custom or {})) is not None:
            return number, claims
    return None, claims


def _whole(many: Quantity | None) -> int | None:
    """A number of devices, or None."""
    try:
        return None if many is None else int(many)
    except ValueError:
        return None


def _counts(status: ComponentStatus | None) -> Counts | None:
    if status is None:
        return None
    ready = status.ready_replicas if status.ready_replicas is not None else status.available_replicas
    return Counts(status.replicas, status.updated_replicas, ready)


DEADLINE_S = 5.0
SOCKET_S = 4.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
GRAPH_VARIABLE = "DYN_PARENT_DGD_K8S_NAME"
NAMESPACE_VARIABLE = "DYN_PARENT_DGD_K8S_NAMESPACE"


class OfficialTransport:
    """The official client as a `Transport`. `namespace` is the planner's own, or that of the kubeconfig's context."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.namespace = namespace
        self._client = client
        self._threads = DaemonExecutor("kubernetes", threads=4)

    async def request(self, method: str, path: str, body: Any = None, *, content: str = JSON) -> Answer:
        try:
            return await self._threads.run(
                lambda: self._ask(method, path, body, content), DEADLINE_S, what=f"{method} {path}"
            )
        except CallOverdue as error:
            raise ApiAway(f"the API server does not answer: {error}") from None

    def _ask(self, method: str, path: str, body: Any, content: str) -> Answer:
        import urllib3
        from kubernetes.client import ApiException

        configuration = self._client.configuration
        headers = {"Accept": JSON, "Content-Type": content}
        token = configuration.auth_settings().get("BearerToken")  # read again, because it may have changed
        if token is not None:
            headers[token["key"]] = token["value"]
        try:
            reply = self._client.rest_client.request(
                method, configuration.host + path, headers=headers, body=body, _request_timeout=SOCKET_S
            )
            return Answer(reply.status, _object(reply.read()))
        except ApiException as error:
            if not error.status:
                raise ApiAway(f"the API server cannot be asked: {error.reason}") from None
            return Answer(int(error.status), _object(error.body))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiAway(
                f"the API server at {configuration.host} does not answer: {type(error).__name__}: {error}"
            ) from None


def _object(data: Any) -> dict[str, Any]:
    try:
        found = json.loads(data or b"{}")
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def connected(kubeconfig: Path | None = None) -> OfficialTransport:
    """A connection as a pod's service account, else by the kubeconfig. Raises `ConfigError`.

    The kubeconfig is `$KUBECONFIG` or `~/.kube/config`. The namespace is the pod's own, or that of the current context.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise ConfigError(
            f"environment kubernetes needs the Kubernetes client: {how_to_install('kubernetes')}"
        ) from None
    configuration = client.Configuration()
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
            namespace = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        else:
            where = None if kubeconfig is None else str(kubeconfig)
            config.load_kube_config(config_file=where, client_configuration=configuration)
            _, context = config.list_kube_config_contexts(config_file=where)
            namespace = context["context"].get("namespace", "default")
    except (config.ConfigException, OSError) as error:
        raise ConfigError(f"there is no way to a Kubernetes API server: {error}") from None
    configuration.retries = False  # the planner itself tries again
    return OfficialTransport(client.ApiClient(configuration), os.environ.get("POD_NAMESPACE") or namespace)


def parent(environ: Callable[[str], str | None], name: str | None, namespace: str | None, own: str) -> tuple[str, str]:
    """`(graph, namespace)` as given, else as Dynamo's operator tells a planner's pod. Raises `ConfigError`."""
    graph = name or environ(GRAPH_VARIABLE)
    if not graph:
        raise ConfigError(
            f"which graph to plan is not known: {GRAPH_VARIABLE} is not set (Dynamo's operator sets it in the pods of "
            "a graph); say --graph"
        )
    return graph, namespace or environ(NAMESPACE_VARIABLE) or own
