"""Where the official client finds the API server, its namespace and its token; which graph is planned."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from kubernetes.config import incluster_config

from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes import api as official
from dynamo_local.kubernetes.api import ApiAway, KubeApi, NotThere, connected, parent
from tests.drivers.kube_http import api_over_http, kubeconfig, serving
from tests.fakes.kubernetes.api_server import Kube
from tests.fakes.kubernetes.graphs import NAME

SET_IN_PODS = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG", "POD_NAMESPACE")


@pytest.fixture(autouse=True)
def _at_a_desk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SET_IN_PODS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def with_namespace(path: Path, namespace: str | None) -> Path:
    """A kubeconfig whose context has this one."""
    config = json.loads(kubeconfig("http://127.0.0.1:1", path).read_text())
    config["contexts"][0]["context"] |= {"namespace": namespace}
    if namespace is None:
        del config["contexts"][0]["context"]["namespace"]
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("given", "found"), [("team-a", "team-a"), (None, "default")])
def test_the_namespace_is_that_of_the_kubeconfigs_context(given: str | None, found: str, tmp_path: Path) -> None:
    assert connected(with_namespace(tmp_path / "config", given)).namespace == found


def test_a_pod_that_is_told_its_namespace_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_namespace(tmp_path / "config", "team-a")
    monkeypatch.setenv("POD_NAMESPACE", "of-the-pod")
    assert connected(path).namespace == "of-the-pod"


def test_without_a_way_to_a_server_the_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no way to a Kubernetes API server"):
        connected(tmp_path / "away")


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a pod's token, namespace and certificate authority are."""
    (tmp_path / "token").write_text("first")
    (tmp_path / "ca.crt").write_text("a certificate")
    (tmp_path / "namespace").write_text("team-b\n")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(official, "NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return tmp_path


def test_in_a_pod_it_is_the_service_accounts(pod: Path) -> None:
    transport = connected(None)
    assert transport.namespace == "team-b"
    assert parent({}.get, NAME, None, transport.namespace) == (NAME, "team-b")


@pytest.mark.parametrize(
    ("environ", "name", "namespace", "found"),
    [
        ({"DYN_PARENT_DGD_K8S_NAME": "told"}, None, None, ("told", "own")),
        ({"DYN_PARENT_DGD_K8S_NAME": "told", "DYN_PARENT_DGD_K8S_NAMESPACE": "there"}, None, None, ("told", "there")),
        ({"DYN_PARENT_DGD_K8S_NAME": "told", "DYN_PARENT_DGD_K8S_NAMESPACE": "there"}, "said", "x", ("said", "x")),
    ],
)
def test_the_graph_is_the_one_that_is_said_else_the_operators(
    environ: dict[str, str], name: str | None, namespace: str | None, found: tuple[str, str]
) -> None:
    assert parent(environ.get, name, namespace, "own") == found


def test_a_graph_that_nobody_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="DYN_PARENT_DGD_K8S_NAME is not set"):
        parent({}.get, None, None, "own")


async def test_requests_run_beside_the_loop_and_errors_are_answers(tmp_path: Path) -> None:
    with serving(api_over_http(Kube(("v1beta1",)))) as url:
        api = KubeApi(connected(kubeconfig(url, tmp_path / "config")), "default", NAME)
        with pytest.raises(NotThere):
            await api.graph()
    nobody = KubeApi(connected(kubeconfig("http://127.0.0.1:1", tmp_path / "config")), "default", NAME)
    with pytest.raises(ApiAway, match="does not answer"):
        await nobody.graph()


async def test_a_server_that_hangs_is_away_after_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "SOCKET_S", 0.2)
    monkeypatch.setattr(official, "DEADLINE_S", 0.5)
    let_go = threading.Event()

    class Hangs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            let_go.wait(10)

        def log_message(self, *_: object) -> None: ...

    with serving(Hangs) as url:
        api = KubeApi(connected(kubeconfig(url, tmp_path / "config")), "default", NAME)
        with pytest.raises(ApiAway):
            await api.graph()
        let_go.set()
