"""The process that forecasts, for real: deadlines, deaths, idling, and what it may not do to the arbiter."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner.forecasting import process as module
from dynamo_local.planner.forecasting.__main__ import NICE
from dynamo_local.planner.forecasting.answers import ArbiterForecaster, InlineForecaster
from dynamo_local.planner.forecasting.process import ForecastProcess
from dynamo_local.planner.predictors import answer
from dynamo_local.planner.queueing import Demand, EngineOptions
from dynamo_local.planner.queueing_task import Question
from dynamo_local.planner.values import Forecasts, ForecastTask
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.system.processes import is_alive
from tests.drivers.served import auntil, until

TASK = ForecastTask("kalman", ((10.0, 20.0, 30.0, 40.0, 50.0), (), (7.0,)), steps=2)
LONG_S = 60.0
"""A deadline that a loaded machine keeps."""


@pytest.fixture
async def forecasts() -> AsyncIterator[ForecastProcess]:
    process = ForecastProcess()
    yield process
    await process.close()
    assert process.pid is None


async def started(forecasts: ForecastProcess) -> int:
    """The pid of its process, which has answered once."""
    assert await forecasts.run(TASK, LONG_S) == answer(TASK)
    assert forecasts.pid is not None
    return forecasts.pid


def stopped(pid: int) -> None:
    """As a fit that never ends."""
    os.kill(pid, signal.SIGSTOP)


# --- answers -----------------------------------------------------------------------------------


async def test_its_answers_are_those_of_the_twin(forecasts: ForecastProcess) -> None:
    failing = ForecastTask("kalman", ((1e308, 0.0, 1e308, 0.0, 1e308), (-1.0,)), options=(("min_points", 3.0),))
    unknown = ForecastTask("arma", ((1.0,),))
    pid = await started(forecasts)
    for task in (failing, unknown, TASK):
        assert await forecasts.run(task, LONG_S) == await InlineForecaster().run(task, 0.0)
    assert forecasts.pid == pid


async def test_tasks_at_once_each_get_their_own_answer(forecasts: ForecastProcess) -> None:
    tasks = [ForecastTask("constant", ((float(number),),)) for number in range(8)]
    told = await asyncio.gather(*(forecasts.run(task, LONG_S) for task in tasks))
    assert told == [Forecasts(((float(number),),)) for number in range(8)]


async def test_our_own_predictors_start_no_process() -> None:
    forecaster = ArbiterForecaster()
    before = psutil.Process().children()
    assert await forecaster.run(TASK, 0.0) == answer(TASK)
    assert psutil.Process().children() == before
    await forecaster.close()


async def test_the_queueing_twin_runs_in_the_process() -> None:
    """It was taken for a predictor of our own, and held the arbiter's loop for a tenth of a second and more."""
    demand = Demand((1.0, 0.5, 1.5), (900, 3000, 12_000), (40, 200, 1))
    task = Question(DEFAULT_PROFILE, 0.5, 0.02, 4, (2.0, 3.0), (demand,), EngineOptions(batches=True)).task()
    forecaster = ArbiterForecaster()
    before = set(psutil.Process().children())
    told = await forecaster.run(task, LONG_S)
    assert len(set(psutil.Process().children()) - before) == 1
    assert told == await InlineForecaster().run(task, 0.0)
    await forecaster.close()


# --- what goes wrong ---------------------------------------------------------------------------


async def test_past_the_deadline_it_is_killed_and_the_next_forecast_starts_another(forecasts: ForecastProcess) -> None:
    pid = await started(forecasts)
    stopped(pid)
    assert await forecasts.run(TASK, 0.2) == Missing("the forecast by kalman was not there within 0.2 s")
    await auntil(lambda: not is_alive(pid))
    assert await started(forecasts) != pid


async def test_waiting_for_another_s_forecast_is_part_of_the_deadline(forecasts: ForecastProcess) -> None:
    pid = await started(forecasts)
    stopped(pid)
    first = asyncio.ensure_future(forecasts.run(TASK, LONG_S))
    await asyncio.sleep(0)
    assert isinstance(await forecasts.run(TASK, 0.1), Missing)
    os.kill(pid, signal.SIGCONT)
    assert await first == answer(TASK)
    assert forecasts.pid == pid


async def test_its_death_is_a_missing_forecast_with_its_reason(forecasts: ForecastProcess) -> None:
    pid = await started(forecasts)
    stopped(pid)
    asked = asyncio.ensure_future(forecasts.run(TASK, LONG_S))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    assert await asked == Missing("the forecast by kalman failed: its process was killed by SIGKILL")
    assert await started(forecasts) != pid


async def test_to_close_it_ends_a_forecast_that_is_waited_for(forecasts: ForecastProcess) -> None:
    stopped(await started(forecasts))
    asked = asyncio.ensure_future(forecasts.run(TASK, LONG_S))
    await asyncio.sleep(0)
    await forecasts.close()
    assert isinstance(await asyncio.wait_for(asked, 5.0), Missing)


async def test_one_that_died_between_two_forecasts_is_missed_once(forecasts: ForecastProcess) -> None:
    pid = await started(forecasts)
    os.kill(pid, signal.SIGKILL)
    await auntil(lambda: not is_alive(pid))
    assert isinstance(await forecasts.run(TASK, LONG_S), Missing)
    await started(forecasts)


async def test_a_forecast_that_is_given_up_leaves_no_answer_for_the_next(forecasts: ForecastProcess) -> None:
    pid = await started(forecasts)
    stopped(pid)
    asked = asyncio.ensure_future(forecasts.run(ForecastTask("constant", ((1.0,),)), LONG_S))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await started(forecasts) != pid


async def test_one_that_cannot_be_started_is_a_missing_forecast(
    forecasts: ForecastProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND", ("/nowhere/python",))
    told = await forecasts.run(TASK, LONG_S)
    assert told == Missing("the forecast by kalman failed: its process cannot be started: No such file or directory")


async def test_one_that_ends_by_itself_is_told_by_its_exit_code(
    forecasts: ForecastProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    told = await forecasts.run(TASK, LONG_S)
    assert told == Missing("the forecast by kalman failed: its process exited with code 3 unasked")


async def test_what_is_no_answer_is_not_taken_for_one(
    forecasts: ForecastProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = "import os; os.read(0, 1); os.write(0, bytes([0, 0, 0, 1, 7])); os.read(0, 1 << 20); os.read(0, 1)"
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", writes))
    told = await forecasts.run(TASK, LONG_S)
    assert isinstance(told, Missing)
    assert "gave no answer but" in told.reason


# --- what it costs, and what it leaves ---------------------------------------------------------


async def test_after_a_while_without_tasks_it_is_ended() -> None:
    forecasts = ForecastProcess(idle_s=0.05)
    pid = await started(forecasts)
    await auntil(lambda: forecasts.pid is None and not is_alive(pid))
    await started(forecasts)
    await forecasts.close()


async def test_it_inherits_no_socket_and_no_secret(forecasts: ForecastProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that it held would keep the arbiter's port taken."""
    monkeypatch.setenv("NATS_TOKEN", "hush")
    monkeypatch.setenv("DYN_API_KEY", "hush")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        pid = await started(forecasts)
        held = {file.name: os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        beyond_its_output = [target for fd, target in held.items() if fd not in ("1", "2")]
        assert sum(target.startswith("socket:") for target in beyond_its_output) == 1
        assert f"socket:[{os.fstat(listener.fileno()).st_ino}]" not in held.values()
    assert b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()


async def test_it_gives_way_to_those_who_serve(forecasts: ForecastProcess) -> None:
    pid = await started(forecasts)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    assert os.getsid(pid) == pid


def test_it_never_outlives_the_arbiter() -> None:
    arbiter = (
        "import asyncio, os, signal\n"
        "from dynamo_local.planner.forecasting.process import ForecastProcess\n"
        "from dynamo_local.planner.values import ForecastTask\n"
        "async def main():\n"
        "    forecasts = ForecastProcess()\n"
        "    await forecasts.run(ForecastTask('constant', ((1.0,),)), 60.0)\n"
        "    os.kill(forecasts.pid, signal.SIGSTOP)\n"
        "    print(forecasts.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", arbiter], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    until(lambda: not is_alive(pid))


def test_the_arbiter_imports_none_of_the_libraries() -> None:
    """Pandas and its like take seconds and hundreds of megabytes: all of `dynamo serve`, and a forecast through the
    process, without one of them."""
    program = (
        "import asyncio, sys\n"
        "import dynamo_local.arbiter.supervisor, dynamo_local.arbiter.planning\n"
        "from dynamo_local.planner.forecasting.answers import ArbiterForecaster\n"
        "from dynamo_local.planner.values import ForecastTask\n"
        "async def main():\n"
        "    forecaster = ArbiterForecaster()\n"
        "    for predictor in ('kalman', 'prophet'):\n"
        "        print(await forecaster.run(ForecastTask(predictor, ((4.0, 4.0, 4.0, 4.0, 4.0, 4.0),)), 60.0))\n"
        "    await forecaster.close()\n"
        "asyncio.run(main())\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:])))\n"
    )
    libraries = ("pandas", "scipy", "statsmodels", "statsforecast", "prophet", "cmdstanpy", "matplotlib")
    ran = subprocess.run(
        [sys.executable, "-c", program, *libraries], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.splitlines() == [*["Forecasts(values=((4.0,),), notes=())"] * 2, "[]"]


async def test_a_real_fit_comes_back_from_the_process(forecasts: ForecastProcess) -> None:
    pytest.importorskip("prophet", reason="the extra predictors is not installed")
    told = await forecasts.run(ForecastTask("prophet", (tuple(100.0 + 10 * number for number in range(20)),)), 150.0)
    assert isinstance(told, Forecasts)
    (values,) = told.values
    assert not isinstance(values, Missing)
    assert values[0] == pytest.approx(300, rel=0.05)
    assert told.notes == ()


async def test_the_arbiter_s_loop_has_less_than_5_ms_of_work_at_a_time(forecasts: ForecastProcess) -> None:
    """From the start of the process to the answer, with as many windows as are remembered. Time of the processor, so
    that it holds on a busy machine; that nothing waits in the loop, the deadlines above show."""
    rising = tuple(float(number % 17 + number) for number in range(600))
    asked = asyncio.ensure_future(forecasts.run(ForecastTask("kalman", (rising, rising, rising)), LONG_S))
    held_s = []
    while not asked.done():
        began_s = time.thread_time()
        await asyncio.sleep(0.001)
        held_s.append(time.thread_time() - began_s)
    assert isinstance(await asked, Forecasts)
    assert max(held_s) < 0.005
