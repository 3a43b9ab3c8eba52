"""Tests what vLLM's CPU build does to a host's processors, and what is done about it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from dynamo_local.engines.vllm import plugin
from dynamo_local.engines.vllm.engine_resources import BINDING, let_nixl_pause, unpin

THREADS = """
import os, sys, threading
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
threading.Thread(target=sys.stdin.read, daemon=True).start()
print("pinned", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: nothing can be bound to fewer")
@pytest.mark.parametrize(("binding", "freed"), [("nobind", True), ("auto", False)])
def test_threads_bound_to_the_last_core_are_let_go(monkeypatch: pytest.MonkeyPatch, binding: str, freed: bool) -> None:
    """All engines of a host shared that core. Where vLLM was asked to bind its threads, they stay where they are."""
    monkeypatch.setenv(BINDING, binding)
    allowed = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"pinned\n"
        unpin([engine.pid, 2**22 + 1])
        threads = [int(name) for name in os.listdir(f"/proc/{engine.pid}/task")]
        found = [os.sched_getaffinity(thread) for thread in threads]
        engine.terminate()
    expected = allowed if freed else {max(allowed)}
    assert len(found) > 1
    assert found == [expected] * len(found)


class Config:
    """NIXL's, as far as it matters here."""

    def __init__(self) -> None:
        self.useProgThread = True
        self._delay = -1

    @property
    def pthrDelay(self) -> int:
        """Microseconds."""
        return self._delay

    @pthrDelay.setter
    def pthrDelay(self, value: int) -> None:
        self._delay = value


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module in NIXL's place, which makes its configuration as `nixl_agent` does."""
    binding = SimpleNamespace(nixlAgentConfig=Config)
    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    api.nixlBind = package._api = binding  # type: ignore[attr-defined]
    package._api = api  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.delenv("UCX_RCACHE_MAX_UNRELEASED", raising=False)
    return binding


def test_nixls_progress_thread_pauses_where_it_was_told_not_to(nixl: SimpleNamespace) -> None:
    let_nixl_pause(1000)
    config = nixl.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == 1000
    config.pthrDelay = 50
    assert config.pthrDelay == 50
    assert isinstance(config, Config)
    assert os.environ.pop("UCX_RCACHE_MAX_UNRELEASED") == "1024"


def test_another_nixl_is_left_alone(nixl: SimpleNamespace) -> None:
    nixl.nixlAgentConfig = SimpleNamespace
    let_nixl_pause(1000)
    assert nixl.nixlAgentConfig is SimpleNamespace
    os.environ.pop("UCX_RCACHE_MAX_UNRELEASED")


def test_an_engines_process_without_the_variable_does_not_import_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads the plugin in every process; on a GPU, and without a connector, nothing is changed."""
    monkeypatch.delenv(plugin.NIXL_PAUSE_US, raising=False)
    monkeypatch.setenv(plugin.WORKER_PID, str(os.getpid()))
    monkeypatch.setitem(sys.modules, "nixl", None)
    plugin.register()
    assert sys.modules["nixl"] is None
