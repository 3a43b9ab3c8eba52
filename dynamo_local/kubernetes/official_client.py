"""The API server by the official client (extra `kubernetes`): its configuration, its TLS and its tokens; our requests.

The client blocks, so every request runs in a thread of its own executor, with a deadline on the socket and one on the
thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_local.errors import ConfigError, how_to_install
from dynamo_local.kubernetes.api import JSON, Answer, ApiAway
from dynamo_local.system.executors import CallOverdue, DaemonExecutor

DEADLINE_S = 5.0
SOCKET_S = 4.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
GRAPH_VARIABLE = "DYN_PARENT_DGD_K8S_NAME"
NAMESPACE_VARIABLE = "DYN_PARENT_DGD_K8S_NAMESPACE"


class OfficialTransport:
    """`api.Transport`. `namespace` is where the planner runs, or that of the kubeconfig's context."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.namespace = namespace
        self._client = client
        self._threads = DaemonExecutor("kubernetes", threads=4)

    async def request(self, method: str, path: str, body: Any = None, *, content: str = JSON) -> Answer:
        """See `Transport`."""
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
        token = configuration.auth_settings().get("BearerToken")  # read again where it may have changed
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
    """As a pod's service account, else by the kubeconfig (`$KUBECONFIG`, `~/.kube/config`). Raises `ConfigError`.

    In a pod the namespace is the pod's own; of a kubeconfig it is that of its current context.
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
    configuration.retries = False  # a deadline is a deadline; the planner itself tries again
    return OfficialTransport(client.ApiClient(configuration), os.environ.get("POD_NAMESPACE") or namespace)


def parent(environ: Callable[[str], str | None], name: str | None, namespace: str | None, own: str) -> tuple[str, str]:
    """`(graph, namespace)`: as given, else as Dynamo's operator tells a planner's pod. Raises `ConfigError`."""
    graph = name or environ(GRAPH_VARIABLE)
    if not graph:
        raise ConfigError(
            f"which graph to plan is not known: {GRAPH_VARIABLE} is not set (Dynamo's operator sets it in the pods of "
            "a graph); say --graph"
        )
    return graph, namespace or environ(NAMESPACE_VARIABLE) or own
