"""Trouble around the page of a real graph: proxies, kills, a clock that is set, a disk without room."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.dashboard.process import ask_running
from dynamo_local.system.processes import is_alive
from tests.drivers.page import link_of
from tests.drivers.served import AGG, Served, until
from tests.tools.certificates import self_signed
from tests.tools.host_faults import full_disk, small_disk

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(300)]

LONG_MS = 60_000
PASSWORD = "a long password"
FAKETIME = "/usr/lib/{}/faketime/libfaketime.so.1"
NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log warn; worker_processes 1;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    listen 127.0.0.1:{port} {ssl};
    location /gpu/box/ {{
      proxy_pass {to}; proxy_set_header Host $http_host; proxy_http_version 1.1; proxy_ssl_verify off; {more}
    }}
  }}
}}
"""
"""A proxy that strips the path where `to` ends with one, and passes `Host` on."""
BUFFERS = """proxy_ignore_headers X-Accel-Buffering; proxy_buffering on;
gzip on; gzip_types text/event-stream; gzip_proxied any;"""
"""It gathers what it passes on, as far as nginx does. A proxy that holds all back: `test_a_silent_stream_…`."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--on-arbiter-death", "keep", target=AGG, namespace="trouble").started() as graph:
        yield graph


@contextmanager
def page_of(served: Served, *words: str, **env: str) -> Iterator[str]:
    """`dynamo dashboard WORDS` beside the graph; gives the link that it prints."""
    process = served.popen("dashboard", "-n", served.namespace, *words, **env)
    try:
        until(lambda: "http" in served.foreground_output(), what=served.foreground_output)
        yield served.foreground_output().strip().splitlines()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class Proxy:
    """An nginx in front of the page. `start` again after `kill`: the same port, the same configuration."""

    def __init__(self, folder: Path, to: str, *, ssl: str = "", more: str = "") -> None:
        nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
        if nginx is None:
            pytest.fail("nginx is not installed: apt-get install nginx-light")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._words = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
        (folder / "nginx.conf").write_text(
            NGINX.format(folder=folder, port=self.port, to=to, ssl=ssl, more=more), encoding="utf-8"
        )
        self._log = folder / "error.log"

    def start(self) -> None:
        self._process = subprocess.Popen(self._words, start_new_session=True)

        def answers() -> bool:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            assert self._process.poll() is None, self._log.read_text()
            return False

        until(answers)

    def kill(self) -> None:
        """SIGKILL, with its workers: all connections break at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def test_tls_a_password_and_a_path_behind_a_proxy_and_the_connection_killed(
    served: Served, open_page: Any, tmp_path: Path
) -> None:
    cert, key = self_signed(tmp_path)
    password = tmp_path / "password"
    password.write_text(f"{PASSWORD}\n")
    password.chmod(0o600)
    far = ("--listen", "0.0.0.0:0", "--cert", str(cert), "--key", str(key), "--password-file", str(password))
    with page_of(served, *far, "--base-path", "/gpu/box", "--name", "localhost") as link:
        assert re.fullmatch(r"https://localhost:\d+/gpu/box/", link), link
        pem = f"ssl; ssl_certificate {cert}; ssl_certificate_key {key}"
        with Proxy(tmp_path, link.replace("localhost", "127.0.0.1"), ssl=pem) as proxy:
            page = open_page(f"https://localhost:{proxy.port}/gpu/box/", ignore_https_errors=True)
            page.get_by_label("Password").fill("a wrong password")
            page.keyboard.press("Enter")
            page.get_by_role("alert").get_by_text("that is wrong").wait_for()
            page.get_by_label("Password").fill(PASSWORD)
            page.keyboard.press("Enter")
            page.wait_for_selector(".connection.live")
            page.get_by_role("button", name="All actions").click()
            (cookie,) = page.context.cookies()
            assert (cookie["path"], cookie["secure"], cookie["httpOnly"]) == ("/gpu/box", True, True)

            proxy.kill()
            page.wait_for_selector(".connection.lost")
            served.ok("scale", "VllmWorker", "+1", "-n", served.namespace)
            proxy.start()
            page.wait_for_selector(".connection.live")
            page.locator("#workers").get_by_text("VllmWorker × 2").wait_for()
            page.locator("#actions").get_by_text(re.compile("VllmWorker_1: ")).first.wait_for()
            page.get_by_role("button", name=f"Act on {served.namespace}_VllmWorker_1").click()
            page.get_by_role("button", name="Show what it would do").click()
            page.get_by_label("to confirm").fill(f"{served.namespace}_VllmWorker_1")
            page.get_by_role("button", name="Drain now").click()
            page.locator("dialog").get_by_text("Done.").wait_for()
    until(lambda: len(served.pids()) == 2, what=served.pids)


@pytest.mark.parametrize("strips", [True, False])
def test_news_come_through_a_proxy_that_buffers(served: Served, open_page: Any, tmp_path: Path, strips: bool) -> None:
    with page_of(served, "--base-path", "/gpu/box") as link:
        origin, code = link.partition("/gpu/box/")[0], link.partition("#")[2]
        with Proxy(tmp_path, f"{origin}/" if strips else origin, more=BUFFERS) as proxy:
            page = open_page(f"http://127.0.0.1:{proxy.port}/gpu/box/#{code}")
            page.wait_for_selector(".connection.live, .connection.poll")
            page.wait_for_selector("#workers tr")
            later_s = time.time() + 2.0
            until(lambda: newest_point_s(page) > later_s)


def test_a_kill_of_page_and_arbiter_is_seen_and_both_come_back(open_page: Any) -> None:
    with Served("--dashboard", "--on-arbiter-death", "keep", target=AGG, namespace="killed").started() as graph:
        page = open_page(link_of(graph))
        page.set_default_timeout(LONG_MS)
        page.wait_for_selector(".connection.live")
        graph.kill_arbiter()
        page.locator(".verdict").get_by_text("The arbiter does not answer").wait_for()
        graph.adopt()
        page.locator(".verdict").get_by_text("The arbiter does not answer").wait_for(state="detached")
        page.get_by_text(re.compile("one gap: .*arbiter")).wait_for()

        pid = ask_running(graph.paths)["pid"]  # type: ignore[index]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid))
        page.wait_for_selector(".connection.lost, .connection.refused")
        page.goto(link_of(graph))
        page.wait_for_selector(".connection.live")


def test_a_clock_that_is_set_is_a_gap_and_time_goes_on(served: Served, open_page: Any, tmp_path: Path) -> None:
    found = [
        path for name in ("x86_64-linux-gnu", "aarch64-linux-gnu") if os.path.exists(path := FAKETIME.format(name))
    ]
    if not found:
        pytest.fail("libfaketime is not installed: apt-get install faketime")
    file = tmp_path / "offset"

    def set_clock(offset: str) -> None:
        (tmp_path / "new").write_text(f"{offset}\n")
        os.replace(tmp_path / "new", file)

    set_clock("+0")
    env = {"LD_PRELOAD": found[0], "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1"}
    with page_of(served, **env, FAKETIME_DONT_FAKE_MONOTONIC="1") as link:
        page = open_page(link)
        page.wait_for_selector(".connection.live")
        set_clock("+3600")
        page.get_by_text(re.compile(r"gaps?: the clock was set by \+3600 s")).wait_for()
        until(shown_time(page, time.time() + 3_600))
        set_clock("-1800")
        page.get_by_text(re.compile(r"gaps?: the clock was set by -5400 s")).wait_for()
        until(shown_time(page, time.time() - 1_800))
        page.wait_for_selector(".connection.live")


def newest_point_s(page: Any) -> float:
    """The time of the newest point that the page has."""
    return float(page.evaluate("import('./assets/live.js').then(({ live }) => live.points.at(-1)?.t ?? 0)"))


def shown_time(page: Any, about_s: float) -> Callable[[], bool]:
    """Whether that point is of about that time."""
    return lambda: abs(newest_point_s(page) - about_s) < 120.0


def test_a_full_disk_is_said_and_points_come_again_when_there_is_room(open_page: Any) -> None:
    with Served("--dashboard", target=AGG, namespace="full") as graph:
        graph.paths.logs.parent.mkdir(parents=True)
        with small_disk(graph.paths.logs, 16 << 20) as mounted:
            if not mounted:
                pytest.skip("only root can mount a small file system")
            graph.start()
            page = open_page(link_of(graph))
            page.set_default_timeout(LONG_MS)
            page.wait_for_selector(".connection.live")
            with full_disk(graph.paths.logs):
                page.locator(".verdict").get_by_text(re.compile("points are lost: .*full")).wait_for()
                assert graph.status()["state"] == "ready"
            page.locator(".verdict").get_by_text("points are lost").wait_for(state="detached")
            graph.ok("down", "-n", "full")
