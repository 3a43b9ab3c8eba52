"""The page's process beside a real graph: what it shows, who may see it, and what it outlives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.dashboard.history import HistoryReader, history_path
from dynamo_local.dashboard.process import ask_running
from dynamo_local.system.processes import is_alive
from tests.drivers.page import Viewer, link_of, server_sent
from tests.drivers.served import Served, asking, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

WORDS = ("--dashboard", "--Frontend.ttft=500", "--Frontend.itl=50", "--on-arbiter-death", "keep")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*WORDS).started() as graph:
        yield graph


@pytest.fixture
def viewer(served: Served) -> Viewer:
    return Viewer(link_of(served))


def test_the_page_shows_a_scale_and_a_drain(served: Served, viewer: Viewer) -> None:
    new = f"{served.namespace}_VllmWorker_1"
    would = viewer.act(act="scale", component="VllmWorker", value="+1", dry_run=True)
    assert [each["watcher_name"] for each in would["would"]] == [new]
    assert new not in served.status()["workers"]
    done = viewer.act(act="scale", component="VllmWorker", value="+1")
    viewer.await_state(lambda state: state["workers"].get(new, {}).get("state") == "ready")
    mark = viewer.await_event(
        "mark", lambda mark: mark["worker"] == new and mark["detail"].get("cause") == done["cause"]
    )
    assert mark["title"].startswith(new)

    status, answer, _ = viewer.ask("POST", "/api/acts", {"act": "drain", "worker": new})
    assert status == 400
    assert "confirm" in answer["error"]
    viewer.act(act="drain", worker=new, confirm=new)
    viewer.await_event("mark", lambda mark: mark["worker"] == new and mark["kind"] == "drain")
    viewer.await_state(lambda state: new not in state["workers"])


def test_the_stream_begins_with_a_snapshot_and_has_a_point_each_second(served: Served, viewer: Viewer) -> None:
    found = server_sent(viewer.origin, viewer.cookie, lambda found: sum(kind == "point" for _, kind, _ in found) >= 2)
    assert found[0][1] == "snapshot"
    assert found[0][2]["state"]["namespace"] == served.namespace
    assert {each["model"] for each in found[0][2]["state"]["gpus"]} == {"sim-tiny", None}
    times = [data["t"] for _, kind, data in found if kind == "point"]
    assert times[1] - times[0] == pytest.approx(1.0, abs=0.9)
    numbers = [int(name.rpartition("-")[2]) for name, _, _ in found]
    assert numbers == sorted(set(numbers))


async def test_a_request_is_shown_with_its_phases_and_no_text(served: Served, viewer: Viewer) -> None:
    async with served.client() as client:
        headers = {"x-request-id": "order-4711"}
        await client.chat.completions.create(**asking("a secret of mine " * 30, 20), extra_headers=headers)

    def found() -> list[dict[str, object]]:
        listed: list[dict[str, object]] = viewer.get("/api/requests?id=order-4711")["requests"]
        return listed

    [request] = await asyncio.to_thread(until, found)
    assert [name for name, _ in request["phases"]] == ["routed", "queued", "prefilled", "handed off", "decoded"]  # type: ignore[attr-defined]
    assert request["prefill_worker"] == f"{served.namespace}_PrefillWorker"
    assert request["worker"] == f"{served.namespace}_VllmWorker"
    assert request["tokens"] == 20
    assert "secret" not in json.dumps(request)


async def test_a_what_if_stands_beside_what_happened(served: Served, viewer: Viewer) -> None:
    async with served.client() as client:
        await client.chat.completions.create(**asking("what if", 5), extra_headers={"x-request-id": "what-if"})
    await asyncio.to_thread(until, lambda: viewer.get("/api/requests?id=what-if")["requests"])
    status, begun, _ = viewer.ask("POST", "/api/whatif", {"fleet": [1, 1], "targets": {"ttft_ms": 400}})
    assert status == 202, begun
    path = f"/api/whatif/{begun['id']}"
    await asyncio.to_thread(until, lambda: viewer.get(path)["state"] != "running")
    answer = viewer.get(path)
    assert answer["state"] == "done", answer
    assert answer["progress"] == 1.0
    assert answer["result"]["requests"] == answer["beside"]["requests"]
    for body in ({}, {"policy": "none"}, {"fleet": [1]}, {"fleet": [1, 1], "hours": 1e9}, {"fleet": ["--x", 1]}):
        assert viewer.ask("POST", "/api/whatif", body)[0] == 400


async def test_a_hostile_request_id_comes_through_as_text(served: Served, viewer: Viewer) -> None:
    name = "</script><img/src=x/onerror=alert(1)>"
    await asyncio.to_thread(viewer.follow)
    async with served.client() as client:
        await client.chat.completions.create(**asking("hello", 5), extra_headers={"x-request-id": name})
    shown = await asyncio.to_thread(viewer.await_event, "request", lambda request: request["id"] == name)
    assert shown["tokens"] == 5
    assert b"<img" not in viewer.raw("/api/requests")


def test_a_log_is_read_from_where_it_was_left(served: Served, viewer: Viewer) -> None:
    assert viewer.ask("GET", "/api/logs/..%2F..%2Fetc%2Fpasswd")[0] == 404
    path = f"/api/logs/{served.namespace}_Frontend"
    log = viewer.get(path)
    assert log["lines"]
    assert viewer.get(f"{path}?after={log['offset']}")["offset"] >= log["offset"]


def test_strangers_see_nothing(served: Served, viewer: Viewer) -> None:
    for path in ("/api/stream", "/api/poll", "/api/history", "/api/marks", "/api/requests", "/api/logs/x"):
        assert viewer.ask("GET", path, cookie=None)[0] == 401
        assert viewer.ask("GET", path, cookie="dynamo_page=guess")[0] == 401
    assert viewer.ask("GET", "/api/session", cookie=None)[0] == 401
    assert viewer.ask("GET", "/api/marks", host="evil.example")[0] == 421
    status, page, headers = viewer.ask("GET", "/", cookie=None)
    assert status == 200
    assert viewer.cookie.partition(";")[0].encode() not in page
    assert "unsafe" not in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers
    assert "HttpOnly" in viewer.cookie
    assert "SameSite=Strict" in viewer.cookie
    assert os.stat(served.paths.page_socket).st_mode & 0o077 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
@pytest.mark.skipif(not (shutil.which("setpriv") and shutil.which("curl")), reason="needs setpriv and curl")
def test_another_user_of_the_host_sees_only_401(served: Served, viewer: Viewer) -> None:
    asked = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "curl", "-s", "-o", "/dev/null"]

    def code(*words: str) -> str:
        done = subprocess.run(
            [*asked, "-w", "%{http_code}", *words], cwd="/", capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout

    for path in ("/api/session", "/api/stream", "/api/poll", "/api/history", "/api/marks", "/api/requests"):
        assert code(f"{viewer.origin}{path}") == "401"
    assert code("--unix-socket", str(served.paths.page_socket), "http://page/link") == "000"  # it cannot connect
    assert code("-X", "POST", "-H", f"origin: {viewer.origin}", f"{viewer.origin}/api/acts") == "401"


def test_an_act_comes_from_the_page_and_shows_the_token(viewer: Viewer) -> None:
    act = {"act": "pause", "dry_run": True}
    assert viewer.ask("POST", "/api/acts", act, origin="http://evil.example")[0] == 403
    assert viewer.ask("POST", "/api/acts", act, origin=None)[0] == 403
    assert viewer.ask("POST", "/api/acts", act, x_dynamo_token=None)[0] == 403
    assert viewer.ask("POST", "/api/acts", act, cookie=None)[0] == 401
    assert viewer.ask("POST", "/api/acts", act)[0] == 200


def test_the_status_says_where_the_page_is_and_how_to_get_in(served: Served, viewer: Viewer) -> None:
    found = until(lambda: served.status()["dashboard"])
    assert found["url"] == f"{viewer.origin}/"
    assert link_of(served).startswith(f"{found['url']}#code=")
    words = found["link"].split()[1:]
    assert served.ok(*words).startswith(found["url"])
    assert f"page      {found['url']}" in served.ok("status", "-n", served.namespace)
    assert "code" not in served.ok("status", "--json", "-n", served.namespace).partition('"dashboard"')[2][:200]


def test_a_code_works_once(served: Served) -> None:
    link = link_of(served)
    Viewer(link)
    with pytest.raises(AssertionError):
        Viewer(link)


def test_a_killed_arbiter_is_a_gap_and_the_page_goes_on(served: Served, viewer: Viewer) -> None:
    before = served.status()["arbiter_pid"]
    viewer.await_state(lambda state: state["arbiter"]["alive"])
    os.kill(before, signal.SIGKILL)
    until(lambda: not is_alive(before))
    viewer.await_state(lambda state: not state["verdict"]["ok"] and not state["arbiter"].get("alive"))
    assert "arbiter" in viewer.state["verdict"]["text"]
    served.adopt()
    viewer.await_state(lambda state: state["arbiter"].get("alive") and state["arbiter"]["adopted"])
    gap = viewer.await_event("gap", lambda gap: gap["to"] is not None)
    assert gap["to"] > gap["from"]

    def kept() -> list[object]:
        return list(
            HistoryReader(history_path(served.paths.logs))
            .span(gap["from"] - 1, gap["to"] + 1, points=1, columns=["running"], now_s=gap["to"])
            .gaps
        )

    assert until(kept)


@pytest.mark.full
def test_a_full_disk_is_said_on_the_page_and_harms_nothing_else(tmp_path: Path) -> None:
    with Served("--dashboard", namespace="full") as graph:
        graph.paths.logs.mkdir(parents=True)
        folder = history_path(graph.paths.logs)
        folder.mkdir()  # as hard to write as a full disk, for root, too
        graph.start()
        viewer = Viewer(link_of(graph))
        viewer.await_state(lambda state: "points are lost" in state["verdict"]["text"])
        viewer.await_event("point", lambda point: True)
        assert graph.status()["state"] == "ready"
        folder.rmdir()
        viewer.await_state(lambda state: state["verdict"]["ok"])
        viewer.await_event("point", lambda point: True)


def test_a_killed_page_comes_back_and_the_arbiter_goes_on(served: Served) -> None:
    before, arbiter = Viewer(link_of(served)), served.status()["arbiter_pid"]
    pid = ask_running(served.paths)["pid"]  # type: ignore[index]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    assert served.status()["state"] == "ready"
    after = Viewer(link_of(served))
    assert served.status()["arbiter_pid"] == arbiter
    assert after.ask("GET", "/api/poll", cookie=before.cookie.partition(";")[0])[0] == 401
    after.await_event("point", lambda point: True)


def test_the_history_is_read_by_the_command(served: Served, viewer: Viewer) -> None:
    viewer.await_event("point", lambda point: True)
    until(lambda: json.loads(served.ok("history", "--since", "10m", "--json"))["columns"]["t"])
    lines = served.ok("history", "--since", "10m", "--csv", "--columns", "running").splitlines()
    assert lines[0] == "t,running"
    assert len(lines) > 1


@pytest.mark.full
def test_a_read_only_page_changes_nothing() -> None:
    with Served(namespace="watched").started() as served:
        process = served.popen("dashboard", "-n", "watched", "--read-only")
        until(lambda: "#code=" in served.foreground_output(), what=served.foreground_output)
        viewer = Viewer(served.foreground_output().strip())
        assert viewer.get("/api/session")["read_only"] is True
        assert viewer.ask("POST", "/api/acts", {"act": "pause", "dry_run": True})[0] == 403
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_what_strangers_could_reach_is_refused(tmp_path: Path) -> None:
    with Served(namespace="far") as served:
        done = served.cli("dashboard", "-n", "far", "--listen", "0.0.0.0:0")
        assert done.returncode != 0
        assert "--password-file" in done.stderr
