"""In the foreground a person sees what every worker writes, also one that was added while they looked."""

from __future__ import annotations

import signal

import pytest

from tests.drivers.scaled import scale
from tests.drivers.served import Served, until
from tests.drivers.terminal import serve_on_terminal

pytestmark = pytest.mark.infra

TALKS = """\
from dynamo_local.sdk.service import async_on_start, endpoint, service


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
