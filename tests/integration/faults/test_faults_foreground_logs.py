"""In the foreground a person sees what every worker writes, also one that was added while they looked."""

from __future__ import annotations

import signal

import pytest

from tests.drivers.scaled import scale
from tests.drivers.served import Served, until
from tests.drivers.terminal import serve_on_terminal

pytestmark = pytest.mark.infra

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
def test_a_worker_that_is_added_is_shown_in_the_foreground() -> None:
    with Served(target=("talks:Talks",), files={"talks.py": TALKS}, frontend=False) as served:
        served.start_foreground()
        scale(served, "Talks", "=2")
        for name in ("dynamo_Talks", "dynamo_Talks_1"):
            line = f"[{name}] hello from the start"
            until(lambda line=line: line in served.foreground_output(), 30.0, what=served.foreground_output)


@pytest.mark.full
def test_a_terminal_that_is_closed_ends_nothing() -> None:
    """The run goes on, with what watches over its logs: their rotation died at the first line that nobody could see."""
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
def test_the_foreground_shows_workers_and_no_servers() -> None:
    with Served(target=("talks:Talks",), files={"talks.py": TALKS}, frontend=False) as served:
        process = served.start_foreground()
        until(lambda: "[dynamo_Talks] hello" in served.foreground_output(), 30.0, what=served.foreground_output)
        process.send_signal(signal.SIGINT)
        assert served.reap_foreground() == 0
        output = served.foreground_output()
        assert "[dynamo_etcd]" not in output
        assert "[dynamo_nats]" not in output
        assert served.log("nats"), "its lines are in its file"
        assert "leaving (Ctrl-C)" in output
        assert "lease was revoked" not in output
