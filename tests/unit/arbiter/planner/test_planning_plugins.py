"""Plugins in their arbiter: there while the planner runs, and heard in what is carried out."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dynamo_local.arbiter.planning import PlannerPlugins
from dynamo_local.clock import AsyncioClock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.planner.loop import PlannerState
from dynamo_local.planner.stages import PipelineContext
from dynamo_local.planner.values import Override
from tests.fakes.planner.planned_arbiter import QUICK, Arbiter
from tests.fakes.planner.plugins import override


async def test_plugins_come_and_go_with_the_planner(arbiter: Arbiter) -> None:
    plugins = PlannerPlugins(AsyncioClock(), environ={}, runtime=arbiter.folder, tell=arbiter.told)
    options = PlannerConfig(
        scheduling={"gateway": {"enabled": True, "listen": "127.0.0.1:0", "allow_insecure": True}},
        plugin_registration={"auth": {"trusted_sources": ["static_secret"], "static_secrets": {"env:A_TOKEN": "a"}}},
    )
    arbiter.planning = arbiter.made(options, plugins)
    with pytest.raises(ConfigError, match="A_TOKEN is not set"):
        await arbiter.planning.start({})
    assert arbiter.planning.state is PlannerState.STOPPED
    await arbiter.planning.start({"plugin_registration": {}, "scheduling": {}})
    assert arbiter.planning.status()["plugins"]["gateway"] is None
    with pytest.raises(BadInput, match="scheduling can be chosen at the start only"):
        await arbiter.planning.set({"scheduling": {"tick_max_duration_seconds": 3}})
    await arbiter.planning.stop()


class FourDecode:
    """A plugin that wants four decode workers, and nothing of prefill."""

    def propose(self, context: PipelineContext) -> Override:
        return override(decode=4)


async def test_a_plugin_has_a_say_in_what_is_carried_out(arbiter: Arbiter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "a_plugin", SimpleNamespace(FourDecode=FourDecode))
    plugin = {"module": "a_plugin", "class": "FourDecode", "plugin_id": "four", "plugin_type": "propose"}
    plugin = {**plugin, "needs": ["observations.workers"]}
    options = PlannerConfig(**QUICK, plugin_registration={"in_process_plugins": [plugin]})
    plugins = PlannerPlugins(AsyncioClock(), environ={}, runtime=arbiter.folder, tell=arbiter.told)
    arbiter.planning = arbiter.made(options, plugins)
    await arbiter.planning.start({})
    (logged, *_) = await arbiter.decisions(1)
    assert ("VllmWorker", 4) in arbiter.scaled
    assert {reason["rule"] for reason in logged["decision"]["reasons"]} == {"overridden"}
    (row,) = arbiter.planning.status()["plugins"]["plugins"]
    assert (row["plugin_id"], row["trouble"]) == ("four", None)
    assert arbiter.planning.status()["plugins"]["last_tick"]["action"] == "apply"
