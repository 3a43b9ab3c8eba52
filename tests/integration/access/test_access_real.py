"""Access to a graph's Frontend and its metrics, on real processes: keys, TLS, and refusals before the start."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from dynamo_local.errors import EXIT_BAD_INPUT
from tests.drivers.http_graphs import MODEL as HTTP_MODEL
from tests.drivers.http_graphs import http_graph, section, seen
from tests.drivers.served import AGG, MODEL, Served, until
from tests.tools.certificates import self_signed

pytestmark = pytest.mark.infra

VARIABLE = "TEAM_KEYS"
FIRST, SECOND = "first-secret-4711", "second-secret-4712"
"""Keys: neither may be found anywhere."""


def chat(model: str = MODEL) -> dict[str, object]:
    return {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--Frontend.host=0.0.0.0",), "there is no api-key"),
        (("--Frontend.api-key=file:open-keys",), "can be read by everybody on this host"),
        ((f"--Frontend.api-key={FIRST}",), "must be file:PATH or env:NAME"),
        (("--Frontend.tls-cert=open-keys", "--Frontend.tls-key=open-keys"), "cannot be used"),
    ],
)
def test_what_leaves_a_frontend_open_or_closed_to_all_is_refused_before_anything_starts(
    words: tuple[str, ...], why: str
) -> None:
    with Served(*words, target=("graphs:Frontend", "--gpus", "sim:1"), files=GRAPH) as served:
        (served.cwd / "open-keys").chmod(0o644)
        done = served.cli(*served.serve_words())
        assert done.returncode == EXIT_BAD_INPUT, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert why in done.stderr
        assert FIRST not in done.stderr
        assert not served.paths.statefile.exists()


GRAPH = {
    "graphs.py": "from dynamo_local.components import Frontend, Processor, VllmWorker\n"
    "Frontend.link(Processor).link(VllmWorker)\n",
    "open-keys": f"{SECOND}\n",
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """HTTPS, keys from the environment, metrics on a socket; and the certificate."""
    cert, key = self_signed(tmp_path_factory.mktemp("tls"))
    words = (f"--Frontend.api-key=env:{VARIABLE}", f"--Frontend.tls-cert={cert}", f"--Frontend.tls-key={key}")
    served = Served(*words, "--Host.metrics-socket=true", target=AGG, env={VARIABLE: f"{FIRST},{SECOND}"})
    with served:
        yield served.start(), cert


def test_over_https_each_of_the_keys_is_served(guarded: tuple[Served, Path]) -> None:
    served, cert = guarded
    assert served.url.startswith("https://")
    with httpx.Client(base_url=served.url, verify=ssl.create_default_context(cafile=str(cert))) as client:
        for key in (FIRST, SECOND):
            assert client.post("/v1/chat/completions", json=chat(), headers=bearer(key)).status_code == 200
        refused = client.post("/v1/chat/completions", json=chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        codes = [client.get(path).status_code for path in ("/health", "/live", "/metrics", "/v1/models")]
        assert codes == [200, 200, 401, 401]


def test_keys_are_nowhere_but_in_the_frontends_own_environment(guarded: tuple[Served, Path]) -> None:
    served, _ = guarded
    shown = {f"argv of {pid}": line for pid, line in served.processes()}
    shown |= {path.name: path.read_text(errors="replace") for path in served.paths.logs.rglob("*") if path.is_file()}
    shown["statefile"] = served.paths.statefile.read_text()
    shown["status"] = served.cli("status", "--json").stdout
    shown["dry run"] = served.cli(*served.serve_words("--dry-run")).stdout
    shown["registry"] = served.etcdctl("get", "--prefix", "")
    for name in served.pids():
        shown[f"options {name}"] = served.cli("ctl", "options", f"dynamo_{name}").stdout
    arbiter = served.status()["arbiter_pid"]
    for pid, line in served.processes():
        if pid not in (arbiter, served.pids()["Frontend"]):
            shown[f"environment of {line}"] = str(psutil.Process(pid).environ())
    assert len(shown) > 15
    assert [where for where, text in shown.items() for key in (FIRST, SECOND) if key in text] == []


def test_metrics_on_the_socket_are_this_users_and_all_else_goes_on_as_before(guarded: tuple[Served, Path]) -> None:
    served, _ = guarded
    path = served.paths.metrics_socket
    assert served.status()["metrics_url"] == f"unix://{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        assert "dynamo_arbiter_workers" in client.get("http://arbiter/metrics").text
    arbiter = psutil.Process(served.status()["arbiter_pid"])
    assert [c.laddr for c in arbiter.net_connections("tcp") if c.status == psutil.CONN_LISTEN] == []
    assert served.cli("top", "--once").returncode == 0


def test_before_http_servers_a_key_can_be_rotated_and_goes_no_further(tmp_path: Path) -> None:
    """One file of keys serves the proxying Frontend and the arbiter's metrics. Neither needs a restart."""
    keys = tmp_path / "keys"
    keys.write_text(f"{FIRST}\n")
    keys.chmod(0o600)
    words = (f"--Frontend.api-key=file:{keys}", f"--Host.metrics-api-key=file:{keys}")
    with http_graph(*words, Server=section("aggregated", 1)).started() as served:
        pid, metrics = served.pids()["Frontend"], served.status()["metrics_url"]
        with httpx.Client(base_url=served.url) as client:

            def codes(key: str) -> tuple[int, int]:
                answer = client.post("/v1/chat/completions", json=chat(HTTP_MODEL), headers=bearer(key))
                return answer.status_code, client.get(metrics, headers=bearer(key)).status_code

            assert (codes(FIRST), codes(SECOND)) == ((200, 200), (401, 401))
            keys.write_text(f"{SECOND}\n")
            until(lambda: codes(FIRST) == (401, 401))
            until(lambda: codes(SECOND) == (200, 200))
        assert served.pids()["Frontend"] == pid
        asked = seen(served, path="/v1/chat/completions", headers=None)
        assert asked
        assert [note for note in asked if "authorization" in note["headers"]] == []
