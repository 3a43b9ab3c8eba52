"""In the foreground a person sees the output of every worker; a terminal that is closed ends nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests.drivers.scaled import scale
from tests.drivers.served import POLL_S, START_TIMEOUT_S, Served, until

pytestmark = pytest.mark.infra


def serve_on_terminal(served: Served) -> tuple[subprocess.Popen[str], Callable[[], None]]:
    """The process, once its graph is ready, and what closes its terminal."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo_local.cli.main", *served.serve_words()],
        cwd=served.cwd,
        env=served.env,
        text=True,
        preexec_fn=lambda: os.login_tty(theirs),
        pass_fds=(theirs,),
    )
    os.close(theirs)
    closing = threading.Event()
    reader = threading.Thread(target=_drain, args=(ours, closing), daemon=True)
    reader.start()

    def close() -> None:
        closing.set()
        reader.join()
        os.close(ours)

    until(lambda: served.cli_status().get("state") == "ready", START_TIMEOUT_S)
    return process, close


def _drain(terminal: int, closing: threading.Event) -> None:
    while not closing.is_set():
        if select.select([terminal], [], [], POLL_S)[0]:
            os.read(terminal, 65536)


TALKS = """\
from dynamo_local.sdk import async_on_start, endpoint, service


@service(name="Talks")
class Talks:
    @async_on_start
    async def start(self):
        print("hello from the start", flush=True)

    @endpoint()
    async def generate(self, request: dict):
        yield request
"""


@pytest.mark.full
def test_a_terminal_that_is_closed_ends_nothing() -> None:
    """The rotation of logs died at the first line that could not be shown."""
    with Served(target=("talks:Talks",), files={"talks.py": TALKS}, frontend=False) as served:
        process, close_terminal = serve_on_terminal(served)
        before = served.pids()
        close_terminal()
        scale(served, "Talks", "=2")
        until(lambda: served.states() == {"Talks": "ready", "Talks_1": "ready"}, 60.0, what=served.status)
        until(lambda: "nothing is shown any more, the run goes on" in served.log("arbiter"), what=served.status)
        after = served.status()
        assert served.pids()["Talks"] == before["Talks"]
        assert [task for task in after["tasks"] if task["deaths"] or not task["running"]] == []
        served.down()
        assert process.wait(30.0) == 0


@pytest.mark.full
def test_the_foreground_shows_workers_also_added_ones_and_no_servers() -> None:
    with Served(target=("talks:Talks",), files={"talks.py": TALKS}, frontend=False) as served:
        process = served.start_foreground()
        scale(served, "Talks", "=2")
        for name in ("dynamo_Talks", "dynamo_Talks_1"):
            line = f"[{name}] hello from the start"
            until(lambda line=line: line in served.foreground_output(), 30.0, what=served.foreground_output)
        process.send_signal(signal.SIGINT)
        assert served.reap_foreground() == 0
        output = served.foreground_output()
        assert "leaving (Ctrl-C)" in output
        assert not [word for word in ("[dynamo_etcd]", "[dynamo_nats]", "lease was revoked") if word in output]
        assert served.log("nats"), "its lines are in its file"
