"""A Kubernetes API server of a few lines: what the planner asks for, answered as a real one answers.

`tests/contract/kubernetes` holds both to the same answers. Objects are versioned. A patch whose test fails is a 422, a
stale version a 409, a missing right a 403. Status and spec are written apart.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.kubernetes.api import JSON, JSON_PATCH, MERGE_PATCH, Answer, ApiAway

PATH = re.compile(
    r"/apis/(?P<version>[^/]+/[^/]+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>status|scale))?"
)
GRAPHS, ADAPTERS = "dynamographdeployments", "dynamographdeploymentscalingadapters"
METADATA = "dynamoworkermetadatas"
REJECTED = "the server rejected our request due to an error in our request"
"""A server's words for a JSON patch that does not fit."""
TYPES = {"frontend", "worker", "prefill", "decode", "planner", "epp"}
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
GROUPS = {"nvidia.com": ("v1beta1", "v1alpha1"), "coordination.k8s.io": ("v1",)}

Rule = tuple[str, str]
"""`(resource, verb)`, as in a Role: `("dynamographdeployments", "patch")`."""


@dataclass(slots=True)
class Kube:
    """The objects, and what is wrong with the server: `away` says that nobody answers."""

    versions: tuple[str, ...] = ("v1beta1",)
    objects: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    counter: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    away: bool = False
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    before: Callable[[str, str], Awaitable[None]] | None = None
    """Awaited before each request is carried out: another one may come first."""
    lose_answers: bool = False
    """Writes arrive, and nobody hears of it."""

    def served(self, plural: str) -> tuple[str, ...]:
        return ("v1alpha1",) if plural == METADATA else self.versions

    def client(self, allowed: frozenset[Rule] | None = None, *, known: bool = True) -> FakeTransport:
        """Somebody with that role (None: who may do all)."""
        return FakeTransport(self, allowed, known)


class FakeTransport:
    """See `Transport`."""

    def __init__(self, kube: Kube, allowed: frozenset[Rule] | None, known: bool) -> None:
        self.namespace = "default"
        self._kube = kube
        self._allowed = allowed
        self._known = known

    async def request(self, method: str, path: str, body: Any = None, *, content: str = JSON) -> Answer:
        await asyncio.sleep(0)
        kube = self._kube
        if kube.before is not None:
            hook, kube.before = kube.before, None
            await hook(method, path)
            kube.before = kube.before or hook
        if kube.away:
            raise ApiAway("the API server at https://fake does not answer: connection refused")
        kube.requests.append((method, path, body))
        answer = self._answered(method, path, copy.deepcopy(body), content)
        if kube.lose_answers and method != "GET":
            raise ApiAway("the API server does not answer: timed out")
        return copy.deepcopy(answer)

    def _answered(self, method: str, path: str, body: Any, content: str) -> Answer:
        if not self._known:
            return _status(401, "Unauthorized", "Unauthorized")
        found = PATH.fullmatch(path)
        if found is None:
            return Answer(404, {})
        group, _, version = found["version"].partition("/")
        plural, sub = found["plural"], found["sub"]
        resource = f"{plural}/{sub}" if sub else plural
        verb = "list" if method == "GET" and found["name"] is None else VERBS[method]
        if self._allowed is not None and (resource, verb) not in self._allowed:
            who = 'User "planner" cannot'
            return _status(403, "Forbidden", f'{plural}.{group} is forbidden: {who} {verb} resource "{resource}"')
        served = GROUPS.get(group, ()) if group != "nvidia.com" else self._kube.served(plural)
        if version not in served:
            return Answer(404, {})
        key = (found["namespace"], plural, found["name"] or "")
        if verb == "list":
            items = [one for (where, kind, _), one in self._kube.objects.items() if (where, kind) == key[:2]]
            return Answer(200, {"items": items})
        if method == "POST":
            return self._create((key[0], plural), body)
        stored = self._kube.objects.get(key)
        if stored is None:
            return _status(404, "NotFound", f'{plural}.{group} "{key[2]}" not found')
        if method == "DELETE":
            del self._kube.objects[key]
            return _status(200, "", "deleted")
        if sub == "scale":
            return self._scaled(method, key, stored, body)
        if method == "GET":
            return Answer(200, stored)
        changed = _changed(method, stored, body, content)
        return changed if isinstance(changed, Answer) else self._store(key, stored, changed, sub)

    def _create(self, where: tuple[str, str], body: dict[str, Any]) -> Answer:
        name = body["metadata"]["name"]
        if (*where, name) in self._kube.objects:
            return _status(409, "AlreadyExists", f'{where[1]} "{name}" already exists')
        body.pop("status", None)
        body["metadata"] |= {"namespace": where[0], "generation": 1, "uid": f"uid-{name}"}
        if (why := _invalid(where[1], body)) is not None:
            return _status(422, "Invalid", why)
        body["metadata"]["resourceVersion"] = str(next(self._kube.counter))
        self._kube.objects[(*where, name)] = body
        return Answer(201, body)

    def _scaled(self, method: str, key: tuple[str, str, str], stored: dict[str, Any], body: Any) -> Answer:
        if method == "PATCH":
            wanted = body.get("metadata", {}).get("resourceVersion")
            replicas = body.get("spec", {}).get("replicas")
            whole = copy.deepcopy(stored)
            whole["metadata"]["resourceVersion"] = wanted or stored["metadata"]["resourceVersion"]
            whole["spec"]["replicas"] = replicas
            answer = self._store(key, stored, whole, None)
            if answer.status >= 300:
                return answer
            stored = self._kube.objects[key]
        meta = {"name": key[2], "namespace": key[0], "resourceVersion": stored["metadata"]["resourceVersion"]}
        shown = {"replicas": stored["spec"]["replicas"]}
        status = {"replicas": stored.get("status", {}).get("replicas", 0)}
        return Answer(
            200, {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": meta, "spec": shown} | {"status": status}
        )

    def _store(
        self, key: tuple[str, str, str], stored: dict[str, Any], changed: dict[str, Any], sub: str | None
    ) -> Answer:
        version = changed["metadata"].get("resourceVersion")
        if version not in (None, stored["metadata"]["resourceVersion"]):
            return _status(409, "Conflict", f'"{key[2]}": the object has been modified')
        kept = "spec" if sub == "status" else "status"
        result = {**changed, kept: stored[kept]} if kept in stored else {k: v for k, v in changed.items() if k != kept}
        if (why := _invalid(key[1], result)) is not None:
            return _status(422, "Invalid", why)
        meta = copy.deepcopy(stored["metadata"])
        if result.get("spec") != stored.get("spec"):
            meta["generation"] = meta.get("generation", 0) + 1
        if {**result, "metadata": 0} != {**stored, "metadata": 0}:
            meta["resourceVersion"] = str(next(self._kube.counter))
        result["metadata"] = meta
        self._kube.objects[key] = result
        return Answer(200, result)


def _changed(method: str, stored: dict[str, Any], body: Any, content: str) -> dict[str, Any] | Answer:
    if method == "PUT":
        return dict(body)
    if content == JSON_PATCH:
        return _json_patched(stored, body)
    if content != MERGE_PATCH:
        return _status(415, "UnsupportedMediaType", f"the media type {content} is not supported")
    if not isinstance(body, Mapping):
        return _status(422, "Invalid", "json: cannot unmarshal array into an object")
    return dict(_merged(copy.deepcopy(stored), body))


def _merged(into: Any, patch: Mapping[str, Any]) -> Any:
    base = into if isinstance(into, dict) else {}
    for name, value in patch.items():
        if value is None:
            base.pop(name, None)
        else:
            base[name] = _merged(base.get(name), value) if isinstance(value, Mapping) else value
    return base


def _json_patched(stored: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any] | Answer:
    changed = copy.deepcopy(stored)
    for each in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")[1:]]
        try:
            where: Any = changed
            for part in path:
                where = where[int(part) if isinstance(where, list) else part]
            key = int(last) if isinstance(where, list) else last
            there = where[key] if each["op"] != "add" else None
        except (KeyError, IndexError, TypeError):
            return _status(422, "Invalid", REJECTED)
        if each["op"] == "test" and there != each["value"]:
            return _status(422, "Invalid", REJECTED)
        if each["op"] in ("add", "replace"):
            where[key] = each["value"]
    return changed


def _invalid(plural: str, body: Mapping[str, Any]) -> str | None:
    spec = body.get("spec", {})
    components = spec.get("components", []) if plural == GRAPHS else []
    services = spec.get("services", {}).values() if plural == GRAPHS else []
    numbers = [one.get("replicas") for one in (*components, *services)]
    if plural == ADAPTERS:
        numbers.append(spec.get("replicas"))
    for number in numbers:
        if number is not None and (not isinstance(number, int) or number < 0):
            return f"spec.replicas: Invalid value: {number}: should be greater than or equal to 0"
    for one in components:
        if one.get("type", "worker") not in TYPES:
            return f'spec.components.type: Unsupported value: "{one["type"]}"'
    names = [one["name"] for one in components]
    return "spec.components: Duplicate value" if len(names) != len(set(names)) else None


def _status(code: int, reason: str, message: str) -> Answer:
    body = {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}
    return Answer(code, body)
