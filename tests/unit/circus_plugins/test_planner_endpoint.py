"""The planner's commands on the arbiter's endpoint: what they ask, how they answer, what circusctl's words become."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from circus.commands import get_commands
from circus.exc import ArgumentError

from dynamo_local.arbiter.event_log import ended_by_death, event_log_path, read
from dynamo_local.arbiter.guarded_run import GuardedRun
from dynamo_local.circus_plugins import planner_commands as commands
from dynamo_local.circus_plugins.circusd_plugin import DynamoPlugin, deployment_options
from dynamo_local.circus_plugins.guardian import end_run
from dynamo_local.cli.common import death_words
from dynamo_local.errors import EXIT_BAD_INPUT, BadInput, ConfigError
from dynamo_local.system.paths import Paths

STATUS = {"state": "running", "options": {}}


class FakePlanner:
    """Records what it is asked; answers with its status."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.error: Exception | None = None

    def planner(self) -> FakePlanner:
        return self

    def status(self) -> dict[str, Any]:
        return STATUS

    async def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer("start", options)

    async def set(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer("set", options)

    async def stop(self) -> dict[str, Any]:
        return self._answer("stop", None)

    async def pause(self) -> dict[str, Any]:
        return self._answer("pause", None)

    async def resume(self) -> dict[str, Any]:
        return self._answer("resume", None)

    async def history(self, count: int) -> list[dict[str, Any]]:
        self._answer("history", count)
        return [{"seq": 1}]

    async def explain(self, count: int) -> list[str]:
        self._answer("explain", count)
        return ["VllmWorker holds"]

    def _answer(self, command: str, what: Any) -> dict[str, Any]:
        self.asked.append((command, what))
        if self.error is not None:
            raise self.error
        return STATUS


async def reply(planner: FakePlanner, command: Any, **props: Any) -> dict[str, Any]:
    made = command()
    made.validate(props)  # circus calls it first, and reads attributes of its own class there
    answered: dict[str, Any] = await made.execute(SimpleNamespace(supervisor=planner), props)
    return answered


async def test_each_command_reaches_the_planner_and_answers_with_its_status() -> None:
    planner = FakePlanner()
    for command in (
        commands.DynamoPlannerStop,
        commands.DynamoPlannerPause,
        commands.DynamoPlannerResume,
        commands.DynamoPlannerStatus,
    ):
        assert await reply(planner, command) == {"planner": STATUS}
    assert await reply(planner, commands.DynamoPlannerStart, options={"max_gpu_budget": 6}) == {"planner": STATUS}
    assert await reply(planner, commands.DynamoPlannerSet, options={"max_gpu_budget": 7}) == {"planner": STATUS}
    assert planner.asked == [
        ("stop", None),
        ("pause", None),
        ("resume", None),
        ("start", {"max_gpu_budget": 6}),
        ("set", {"max_gpu_budget": 7}),
    ]


async def test_history_and_explain_take_a_number() -> None:
    planner = FakePlanner()
    assert await reply(planner, commands.DynamoPlannerHistory) == {"decisions": [{"seq": 1}]}
    assert await reply(planner, commands.DynamoPlannerExplain, count=3) == {"words": ["VllmWorker holds"]}
    assert planner.asked == [("history", 20), ("explain", 3)]


@pytest.mark.parametrize("count", [0, -1, True, "3", 10_000, None])
async def test_a_number_that_is_none_is_refused(count: Any) -> None:
    answered = await reply(FakePlanner(), commands.DynamoPlannerExplain, count=count)
    assert (answered["status"], answered["exit_code"]) == ("error", EXIT_BAD_INPUT)
    assert "'count' must be a whole number" in answered["reason"]


@pytest.mark.parametrize("options", [["max_gpu_budget"], "max_gpu_budget=6", 3])
async def test_options_that_are_no_object_are_refused(options: Any) -> None:
    answered = await reply(FakePlanner(), commands.DynamoPlannerSet, options=options)
    assert answered["exit_code"] == EXIT_BAD_INPUT
    assert "'options' must be an object" in answered["reason"]


async def test_a_refusal_keeps_its_words_and_its_exit_code() -> None:
    planner = FakePlanner()
    planner.error = ConfigError("Planner: max_gpu_budget: must be 1 or more")
    answered = await reply(planner, commands.DynamoPlannerStart, options={"max_gpu_budget": 0})
    assert (answered["reason"], answered["exit_code"]) == ("Planner: max_gpu_budget: must be 1 or more", EXIT_BAD_INPUT)


def test_circusctls_words_are_settings() -> None:
    """`dynamo ctl dynamo_planner_set max-gpu-budget=6`."""
    message = commands.DynamoPlannerSet().message("max-gpu-budget=6", "no_operation=true")
    assert message["properties"]["options"] == {"max_gpu_budget": 6, "no_operation": True}
    assert commands.DynamoPlannerHistory().message("5")["properties"] == {"count": 5}
    assert commands.DynamoPlannerStop().message()["properties"] == {}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (commands.DynamoPlannerSet, ("max-gpu-budget",)),
        (commands.DynamoPlannerStart, ("frobnicate=1",)),
        (commands.DynamoPlannerStop, ("now",)),
        (commands.DynamoPlannerHistory, ("many",)),
        (commands.DynamoPlannerExplain, ("1", "2")),
    ],
)
def test_circusctls_words_that_make_no_sense_are_refused(command: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError):
        command().message(*words)


def test_circusctl_shows_the_answer_as_it_is() -> None:
    shown = commands.DynamoPlannerStatus().console_msg({"id": "1", "status": "ok", "time": 1.0, "planner": STATUS})
    assert json.loads(shown) == {"planner": STATUS}


def test_dynamo_ctl_and_every_host_know_the_planners_commands() -> None:
    """circus knows a command once its module is imported; `commands` is what they all import."""
    importlib.import_module("dynamo_local.circus_plugins.commands")
    names = {"start", "stop", "pause", "resume", "set", "status", "explain", "history"}
    assert {f"dynamo_planner_{name}" for name in names} <= set(get_commands())


# --- circusd plugin
# The plugin's section of an ini becomes the options of `dynamo serve`.

YAML = "Host:\n  gpus: sim:2\n  circusd:\n    graph: graphs.disagg:Frontend\n"


def _file(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def test_the_yaml_says_what_the_command_line_would(tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    more = "    working-dir: llm\n    namespace: prod\n    drain_deadline_s: 30\n"
    options, folder = deployment_options(_file(tmp_path, YAML + more), {})
    assert folder == tmp_path / "llm"
    assert options.target == "graphs.disagg:Frontend"
    assert options.file == tmp_path / "deployment.yaml"
    assert (options.namespace, options.drain_deadline_s, options.start_deadline_s) == ("prod", 30.0, 300.0)
    assert (options.on_arbiter_death, options.adopt) == ("keep", True)


def test_the_folder_is_the_yamls_own_by_default(tmp_path: Path) -> None:
    """Whatever circusd's current folder is."""
    assert deployment_options(_file(tmp_path, YAML), {})[1] == tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Host: {gpus: 'sim:2'}\n", "does not say which graph"),
        ("Host: {circusd: {namespace: prod}}\n", "graph"),
        (YAML + "    working-dir: nowhere\n", "there is no folder"),
        (YAML + "    workingdir: llm\n", "workingdir"),
    ],
)
def test_a_deployment_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises((BadInput, ConfigError), match=said):
        deployment_options(_file(tmp_path, text), {})


@pytest.mark.parametrize(
    ("ssh", "config", "said"),
    [(None, {}, "needs `deployment = "), ("host", {"deployment": "x.yaml"}, "another host")],
)
def test_a_section_that_cannot_be_used_is_refused(ssh: str | None, config: dict[str, str], said: str) -> None:

    def serve() -> None:
        DynamoPlugin("ipc://c", "ipc://p", 1.0, ssh, name="plugin:llm", **config)._serve()

    # circus makes its loop the thread's current one: not of this thread, which has pytest's.
    with ThreadPoolExecutor(1) as thread, pytest.raises(BadInput, match=said):
        thread.submit(serve).result(10)


def test_circusd_itself_imports_nothing_heavy() -> None:
    """circusd resolves the plugin's name in its own process, and forks from it: no gRPC, no NATS, no pydantic there."""
    code = (
        "import sys, dynamo_local.circus_plugins.circusd_plugin\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'grpc', 'nats', 'aetcd', 'pydantic', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


# --- guardian end
# A guardian ends a run, and writes that end.


@pytest.fixture
def guarded(tmp_path: Path) -> GuardedRun:
    """A run of which nothing lives any more."""
    paths = Paths.of("test", {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)})
    paths.prepare()
    where = (str(paths.runtime), str(paths.statefile), str(paths.logs))
    return GuardedRun("test", "01J", *where, arbiter_pid=4711, arbiter_start_time=1.0, keep=False)


def test_the_end_of_a_run_is_an_event_though_its_arbiter_could_not_write_it(guarded: GuardedRun) -> None:
    worker = {"watcher_name": "test_W", "component": "W", "pid": 2**22 + 1, "pid_start_time": 1.0}
    guarded.paths.statefile.write_text(json.dumps({"run_id": "01J", "components": {"test_W": worker}}))
    end_run(guarded, "was killed by SIGKILL")
    (ended,) = read(event_log_path(guarded.paths.logs))
    assert (ended["event"], ended["run_id"], ended["arbiter_pid"]) == ("RunEnded", "01J", 4711)
    assert "its arbiter (pid 4711) was killed by SIGKILL at 20" in death_words(ended)
    assert "the guardian ended its 1 worker, etcd and NATS" in death_words(ended)
    assert ended_by_death(event_log_path(guarded.paths.logs), "test") == ended
    assert not guarded.paths.runtime.exists()


def test_a_log_that_cannot_be_written_ends_the_run_all_the_same(
    guarded: GuardedRun, caplog: pytest.LogCaptureFixture
) -> None:
    event_log_path(guarded.paths.logs).mkdir()
    end_run(guarded, "was killed by SIGKILL")
    assert not guarded.paths.runtime.exists()
    assert "the end of the run is not in the event log" in caplog.text
