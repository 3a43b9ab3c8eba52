"""Our arbiter against the real circus: each test keeps one behaviour that we lean on, or one fault that we cured."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_local.system.processes import is_alive, start_time_s
from tests.drivers.circus_arbiter import PYTHON, Harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path)
    await harness.arbiter.start()
    yield harness
    await harness.end()


async def written(path: Path, timeout_s: float = 5.0) -> str:
    deadline_s = time.monotonic() + timeout_s
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline_s, f"nothing was written to {path}"
        await asyncio.sleep(0.01)
    return path.read_text()


async def test_a_watcher_has_another_name_and_the_same_process(harness: Harness) -> None:
    pid = await harness.run("ns_A", "import time; time.sleep(60)")
    harness.arbiter.rename("ns_A", "ns_Other", pid + 1)  # another process than it was: nothing is changed
    assert (await harness.ask("list"))["watchers"] == ["ns_a"]
    harness.arbiter.rename("ns_A", "ns_B", pid)
    assert (await harness.ask("list"))["watchers"] == ["ns_b"]
    assert (await harness.ask("list", name="ns_B"))["pids"] == [pid]
    again = await harness.run("ns_A", "import time; time.sleep(60)")
    assert again != pid
    os.kill(pid, signal.SIGKILL)
    name, found, code, _ = await asyncio.wait_for(harness.exits.get(), 10)
    assert (name, found, code) == ("ns_B", pid, -signal.SIGKILL)
    harness.arbiter.rename("ns_A", "ns_B", again)  # that watcher has no process any more: it makes room
    assert (await harness.ask("list"))["watchers"] == ["ns_b"]


async def test_a_spare_is_a_worker_and_the_same_process(harness: Harness) -> None:
    pid = await harness.run("ns_spare", "import time; time.sleep(60)")
    worker = harness.spec("ns_W", "import time; time.sleep(70)")
    assert harness.arbiter.rename_process("ns_spare", worker) == pid
    assert (await harness.ask("list"))["watchers"] == ["ns_w"]
    assert (await harness.ask("list", name="ns_W"))["pids"] == [pid]
    assert (await harness.ask("status"))["statuses"] == {"ns_W": "active"}
    options = (await harness.ask("options", name="ns_W"))["options"]
    assert (options["cmd"], options["env"]["SOME_TOKEN"]) == (shlex.join(worker.argv), "****")
    other = await harness.run("ns_spare", "import time; time.sleep(60)")
    with pytest.raises(KeyError):
        harness.arbiter.rename_process("ns_spare", worker)
    os.kill(pid, signal.SIGKILL)
    name, found, code, _ = await asyncio.wait_for(harness.exits.get(), 10)
    assert (name, found, code) == ("ns_W", pid, -signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        harness.arbiter.rename_process("ns_W", harness.spec("ns_Other", "pass"))
    assert harness.arbiter.rename_process("ns_spare", worker) == other  # the watcher without a process makes room


async def test_stock_commands_answer_and_harmful_ones_are_refused(harness: Harness) -> None:
    await harness.run("ns_A", "import time; time.sleep(60)")
    assert (await harness.ask("list"))["watchers"] == ["ns_a"]
    assert (await harness.ask("status"))["statuses"] == {"ns_A": "active"}
    assert (await harness.ask("numprocesses"))["numprocesses"] == 1
    options = (await harness.ask("options", name="ns_A"))["options"]
    assert "hush" not in json.dumps(options), "secrets are masked in circusctl options"
    for command in ("reload", "reloadconfig", "incr", "restart", "kill", "stats", "set"):
        answer = await harness.ask(command, name="ns_A")
        assert answer["status"] == "error"
        assert "refused" in str(answer["reason"])


SLEEPS = "import time; time.sleep(600)"
ASKS_AND_SLEEPS = (
    "import os, sys, time; sys.path.append(os.environ['ROOT']); from dynamo_local.system.prctl import die_as_asked\n"
    "die_as_asked(os.environ); assert 'DYN_DEATH_SIGNAL' not in os.environ; print('asked', flush=True); time.sleep(600)"
)


@pytest.mark.parametrize("asks_itself", [False, True])
async def test_the_worker_dies_with_its_arbiter(tmp_path: Path, asks_itself: bool) -> None:
    code = ASKS_AND_SLEEPS if asks_itself else SLEEPS
    script = (
        "import asyncio, sys, os\n"
        "sys.path.insert(0, os.environ['ROOT'])\n"
        "from pathlib import Path\n"
        "from tests.drivers.circus_arbiter import Harness\n"
        "async def main():\n"
        "    harness = Harness(Path(sys.argv[1])); await harness.arbiter.start()\n"
        f"    print(await harness.run('ns_A', {code!r}, asks_itself={asks_itself}), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [PYTHON, "-W", "ignore", "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ROOT": root},
    ) as arbiter:
        assert arbiter.stdout is not None
        worker = int(arbiter.stdout.readline())
        started = start_time_s(worker)
        assert is_alive(worker, started)
        if asks_itself:
            assert await written(tmp_path / "ns_A.log") == "asked\n"
        arbiter.kill()
        arbiter.wait()
    deadline_s = time.monotonic() + 2
    while is_alive(worker, started):
        assert time.monotonic() < deadline_s, "the worker outlived its arbiter"
        await asyncio.sleep(0.005)
