"""What the planner asks of a Kubernetes API server: a graph, its scaling adapters, a lease. Errors are typed.

`Transport` is the seam: the official client in a pod, an API server of a few lines in tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from pydantic import ValidationError

from dynamo_local.errors import DynamoError, InfraUnavailable
from dynamo_local.kubernetes.changes import PatchGraph, ScaleAdapter
from dynamo_local.kubernetes.graph import Adapter, Seen
from dynamo_local.kubernetes.model import (
    ADAPTER_PLURAL,
    GRAPH_PLURAL,
    METADATA_PLURAL,
    V1ALPHA1,
    V1BETA1,
    WrongKind,
    adapter_name,
)
from dynamo_local.kubernetes.reading import read_seen

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """A status of HTTP, and the object (of an error: a `Status`; empty where the body was no JSON)."""

    status: int
    body: Mapping[str, Any]


class Transport(Protocol):
    """One request of the API server."""

    async def request(self, method: str, path: str, body: Any = None, *, content: str = JSON) -> Answer:
        """Within a deadline of its own. Raises `ApiAway` where there was no answer."""
        ...


class ApiAway(InfraUnavailable):
    """The API server cannot be reached, or did not answer in time. What was written may have arrived."""

    code = "api_away"


class ApiRefused(DynamoError):
    """The API server said no."""

    code: ClassVar[str] = "api_refused"


class Conflict(ApiRefused):
    """The object has changed since it was read (409), or a test of the patch failed (422)."""

    code = "conflict"
    retryable = True


class Forbidden(ApiRefused):
    """The service account may not do that (403), or is not known (401)."""

    code = "forbidden"


class NotThere(ApiRefused):
    """The object is not there."""

    code = "not_there"


class KubeApi:
    """One graph in one namespace. `version` is the one that the server has, once the graph was read."""

    def __init__(self, transport: Transport, namespace: str, name: str) -> None:
        self._transport = transport
        self.namespace = namespace
        self.name = name
        self._version = ""

    # --- the graph ---------------------------------------------------------------------------------

    async def graph(self) -> Seen:
        """The graph, and the adapters that its components say they have. Raises `NotThere`, `Forbidden`, `ApiAway`."""
        seen = await self._document()
        adapters: dict[str, Adapter] = {}
        for one in (one for one in seen.components if one.by_adapter and one.role is not None):
            try:
                adapters[one.name] = await self._adapter(seen, one.name)
            except NotThere:
                continue  # told where it matters: nothing is written past it
        return replace(seen, adapters=adapters)

    async def _document(self) -> Seen:
        versions = (self._version,) if self._version else (V1BETA1, V1ALPHA1)
        for version in versions:
            answer = await self._transport.request("GET", self._path(version, GRAPH_PLURAL, self.name))
            if answer.status == 404 and answer.body.get("reason") != "NotFound" and version != versions[-1]:
                continue  # the server does not have this version
            try:
                seen = read_seen(_checked(answer, f"{GRAPH_PLURAL}/{self.name}", self.namespace))
            except (WrongKind, ValidationError) as error:
                raise ApiRefused(f"{GRAPH_PLURAL}/{self.name} cannot be read: {error}") from None
            self._version = version
            return seen
        raise AssertionError("unreachable")

    async def patch(self, write: PatchGraph) -> None:
        """Raises `Conflict` where the graph is another one by now."""
        path = self._path(self._version, GRAPH_PLURAL, self.name)
        answer = await self._transport.request("PATCH", path, list(write.operations), content=JSON_PATCH)
        _checked(answer, f"{GRAPH_PLURAL}/{self.name}", self.namespace)

    # --- scaling adapters --------------------------------------------------------------------------

    async def _adapter(self, seen: Seen, component: str) -> Adapter:
        name = adapter_name(seen.name, component)
        answer = await self._transport.request("GET", self._scale(name))
        scale = _checked(answer, f"{ADAPTER_PLURAL}/{name}", self.namespace)
        return Adapter(name, int((scale.get("spec") or {}).get("replicas", 0)), scale["metadata"]["resourceVersion"])

    async def scale(self, write: ScaleAdapter) -> None:
        """Raises `Conflict` where somebody else has scaled it since it was read."""
        adapter = write.adapter
        body = {"metadata": {"resourceVersion": adapter.resource_version}, "spec": {"replicas": write.replicas}}
        answer = await self._transport.request("PATCH", self._scale(adapter.name), body, content=MERGE_PATCH)
        _checked(answer, f"{ADAPTER_PLURAL}/{adapter.name}", self.namespace)

    def _scale(self, name: str) -> str:
        return f"{self._path(self._version, ADAPTER_PLURAL, name)}/scale"

    # --- workers -----------------------------------------------------------------------------------

    async def worker_metadata(self) -> tuple[Mapping[str, Any], ...]:
        """The `DynamoWorkerMetadata` objects of the namespace. Raises `NotThere` where the cluster has no such kind."""
        path = f"/apis/{V1ALPHA1}/namespaces/{self.namespace}/{METADATA_PLURAL}"
        answer = _checked(await self._transport.request("GET", path), METADATA_PLURAL, self.namespace)
        return tuple(one for one in answer.get("items") or () if isinstance(one, dict))

    # --- the lease ---------------------------------------------------------------------------------

    async def lease(self, name: str) -> Mapping[str, Any]:
        """Raises `NotThere`."""
        return _checked(await self._transport.request("GET", self._leases(name)), f"leases/{name}", self.namespace)

    async def create_lease(self, lease: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises `Conflict` where somebody was quicker."""
        answer = await self._transport.request("POST", self._leases(), lease)
        return _checked(answer, f"leases/{lease['metadata']['name']}", self.namespace)

    async def replace_lease(self, lease: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises `Conflict` where somebody else has written it since."""
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
    said = answer.body.get("message") or f"status {answer.status}"
    where = f"{what} in namespace {namespace}"
    if answer.status == 404:
        raise NotThere(f"there is no {where}: {said}")
    if answer.status in (401, 403):
        raise Forbidden(f"the planner may not use {where}: {said}")
    if answer.status in (409, 422):
        raise Conflict(f"{where} has changed meanwhile: {said}")
    if answer.status == 429 or answer.status >= 500:
        raise ApiAway(f"the API server cannot serve {where} now: {said}")
    raise ApiRefused(f"the API server refuses {where}: {said}")


def all_texts(texts: Iterable[str]) -> str:
    """Several faults as one text, a line each."""
    return "\n".join(f"  - {text}" for text in texts)
