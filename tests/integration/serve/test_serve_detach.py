"""`dynamo serve --detach`: it returns when all is ready or has failed, says why, and leaves nothing of the caller's."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, EXIT_TIMED_OUT
from tests.drivers.served import AGG, Served, until

pytestmark = pytest.mark.infra

APP = """\
import asyncio
from dynamo_local.sdk import async_on_start, depends, endpoint, service


@service(name="Backend", resources={"gpu": 1})
class Backend:
    @async_on_start
    async def start(self):
        HOOK

    @endpoint()
    async def generate(self, request):
        yield request


@service(name="Front")
class Front:
    backend = depends(Backend)
"""

FAILING = 'raise RuntimeError("there is no such model, sorry")'
WAITING = 'print("still loading", flush=True); await asyncio.Event().wait()'


def _app(hook: str, *words: str) -> Served:
    """Two services on simulated GPUs; the first one's start hook is `hook`."""
    files = {"app.py": APP.replace("HOOK", hook)}
    return Served("--gpus", "sim:8", *words, target=("app:Front",), files=files, frontend=False)


@pytest.mark.timing
def test_detach_says_what_happens_and_returns_when_ready() -> None:
    with Served(target=AGG) as served:
        began_s = time.monotonic()
        done = served.cli(*served.serve_words("--detach"))
        took_s = time.monotonic() - began_s
        assert done.returncode == 0, done
        assert done.stderr == ""
        assert set(served.states().values()) == {"ready"}
        assert f"ready: {served.url}" in done.stdout
        assert "dynamo_VllmWorker: starting on GPU 0" in done.stdout
        assert "etcd" in done.stdout
        assert took_s < 40.0


@pytest.mark.full
def test_the_detached_arbiter_holds_none_of_the_callers_descriptors() -> None:
    read_end, write_end = os.pipe()
    with Served(target=AGG) as served:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "dynamo_local.cli.main", *served.serve_words("--detach")],
                cwd=served.cwd,
                env=served.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(write_end,),
            )
            os.close(write_end)
            process.communicate(timeout=30.0)  # returns at EOF of both pipes, not at the process's end
            readable, _, _ = select.select([read_end], [], [], 1.0)
            ends = readable and os.read(read_end, 1)
        finally:
            os.close(read_end)
        arbiter = served.status()["arbiter_pid"]
        assert process.returncode == 0
        assert ends == b"", "somebody still holds the inherited descriptor"
        assert os.getsid(arbiter) == arbiter
        targets = {os.readlink(link) for link in Path(f"/proc/{arbiter}/fd").iterdir() if link.exists()}
        assert not any(target.startswith(("/dev/pts", "/dev/tty")) for target in targets)


def test_a_failing_worker_fails_the_start_with_its_reason() -> None:
    with _app(FAILING) as served:
        done = served.cli(*served.serve_words("--detach"))
        assert done.returncode == EXIT_FAILED
        assert "dynamo_Backend exited with code 1" in done.stderr
        assert "RuntimeError: there is no such model, sorry" in done.stderr
        assert str(served.paths.log_file("dynamo_Backend")) in done.stderr
        assert served.leftovers() == []


@pytest.mark.full
@pytest.mark.timing
def test_a_start_deadline_ends_a_start_that_never_ends() -> None:
    with _app(WAITING, "--start-deadline", "5") as served:
        began_s = time.monotonic()
        done = served.cli(*served.serve_words("--detach"))
        took_s = time.monotonic() - began_s
        assert done.returncode == EXIT_TIMED_OUT
        assert "dynamo_Backend" in done.stderr
        assert "within 5 s" in done.stderr
        assert "still loading" in done.stderr
        assert 5.0 <= took_s < 40.0
        assert served.leftovers() == []


def test_a_port_that_is_taken_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Served(f"--Frontend.port={port}", target=AGG, frontend=False) as served:
            done = served.cli(*served.serve_words("--detach"))
            assert (done.returncode, done.stdout) == (EXIT_BAD_INPUT, "")
            assert f"port {port} on 127.0.0.1 is in use" in done.stderr
            assert "--Frontend.port=PORT" in done.stderr
            plan = served.cli(*served.serve_words("--dry-run"))
            assert plan.returncode == EXIT_OK
            assert f"port {port} on 127.0.0.1 is in use" in plan.stderr
            assert served.leftovers() == []


@pytest.mark.full
def test_a_killed_arbiter_ends_the_wait_for_it() -> None:
    with _app(WAITING) as served:
        process = served.popen(*served.serve_words("--detach"))
        until(lambda: served.paths.control_socket.exists() and "Backend" in served.pids())
        os.kill(served.status()["arbiter_pid"], signal.SIGKILL)
        assert served.reap_foreground(5.0) == EXIT_FAILED, process
        assert "the arbiter was killed by SIGKILL before it was ready" in served.foreground_output()
        until(lambda: not served.processes(), 5.0, what=served.processes)
        (served.cwd / "app.py").write_text(APP.replace("HOOK", "pass"))
        served.start()


@pytest.mark.full
def test_ctrl_c_while_waiting_for_a_detached_start_takes_the_start_back() -> None:
    with _app(WAITING) as served:
        process = served.popen(*served.serve_words("--detach"))
        until(lambda: served.paths.control_socket.exists() and "Backend" in served.pids())
        process.send_signal(signal.SIGINT)
        assert served.reap_foreground(10.0) == 130
        assert "left before it was ready: Ctrl-C" in served.foreground_output()
        assert served.leftovers() == []


@pytest.mark.full
def test_a_statefile_that_is_broken_does_not_stop_a_start() -> None:
    with _app("pass") as served:
        served.paths.statefile.parent.mkdir(parents=True, mode=0o700)
        served.paths.statefile.write_text('{"schema_version": 1, "namesp')
        served.start()
        assert served.statefile()["run_id"] == served.status()["run_id"]
