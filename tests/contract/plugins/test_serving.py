"""`serve`: a Python object as a gRPC plugin, in each stage, from its first call to its last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.errors import DynamoError
from dynamo_local.planner.plugins.serving import RegistrationRefused, serve
from dynamo_local.planner.stages import PipelineContext, PluginSpec, Predicted, Stage
from dynamo_local.planner.values import Override, OverrideType, Prediction, Proposal, Reject, Traffic
from tests.drivers.plugin_processes import PlannerSide, planner_side
from tests.fakes.planner.plugins import override

OWN = Proposal("builtin_load_propose", 10, override(decode=3))


class Everything:
    """Takes part in each stage, keeps what it was shown, and counts how often it was let go of."""

    def __init__(self) -> None:
        self.seen: list[PipelineContext] = []
        self.proposals: tuple[Proposal, ...] = ()
        self.resets: list[str] = []

    async def predict(self, context: PipelineContext) -> Predicted:
        self.seen.append(context)
        return Predicted(Prediction(num_req=42.0), final=True)

    def propose(self, context: PipelineContext) -> Override:
        self.seen.append(context)
        return override(prefill=7, decode=11)

    def reconcile(self, context: PipelineContext, proposals: tuple[Proposal, ...]) -> Reject | None:
        self.proposals = proposals
        return Reject("too many at once") if len(proposals) > 2 else None

    async def constrain(self, context: PipelineContext) -> Override:
        return override(prefill=4, decode=9, kind=OverrideType.AT_MOST)

    def reset(self, reason: str) -> None:
        self.resets.append(reason)


@asynccontextmanager
async def served(plugin: object, tmp_path: Path, *stages: Stage) -> AsyncIterator[list[dict[str, Any]]]:
    """The object as a server of its own for each stage; how a configuration names them."""
    listed, tasks = [], []
    for stage in stages:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        spec, listen = PluginSpec(f"all-{stage}", stage), f"unix://{tmp_path}/{stage}.sock"
        tasks.append(asyncio.ensure_future(serve(plugin, spec, listen=listen, ready=ready.set_result)))
        listed.append({"plugin_id": spec.plugin_id, "plugin_type": str(stage), "endpoint": await ready})
    try:
        yield listed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_all_stages_and_the_end(tmp_path: Path) -> None:
    plugin = Everything()
    async with served(plugin, tmp_path, *Stage) as listed, planner_side({"external_plugins": listed}) as side:
        busy = Traffic(0.0, 60.0, num_req=120.0, isl=3000.0, osl=150.0)
        assert await side.tick(OWN, traffic=busy, prefill=1) == {"prefill": 4, "decode": 9}
        assert {row.trouble for row in side.service.rows()} == {None}
        predicting, proposing = plugin.seen
        assert predicting.observations.traffic is not None
        assert predicting.observations.traffic.num_req == 120.0
        assert predicting.observations.workers is not None
        assert predicting.observations.workers.ready_prefill == 1
        assert proposing.predictions == Prediction(num_req=42.0, source="all-predict")
        assert [proposal.plugin_id for proposal in plugin.proposals] == ["builtin_load_propose", "all-propose"]
        await side.service.stop()
        assert plugin.resets == ["planner_stopped"] * 4


async def test_a_reject_comes_over_the_wire(tmp_path: Path) -> None:
    plugin = Everything()
    async with served(plugin, tmp_path, Stage.RECONCILE) as listed, planner_side({"external_plugins": listed}) as side:
        others = (Proposal("a", 1, override(decode=4)), Proposal("b", 2, override(decode=5)))
        assert await side.tick(OWN, *others) == {}
        assert side.service.pipeline.last is not None
        assert side.service.pipeline.last.why == "all-reconcile rejects: too many at once"


class Broken:
    """Raises, or answers what is no answer."""

    def propose(self, context: PipelineContext) -> Any:
        raise KeyError("on purpose")

    def constrain(self, context: PipelineContext) -> Any:
        return 3


async def test_what_is_wrong_with_it_is_told_to_the_planner(tmp_path: Path) -> None:
    stages = (Stage.PROPOSE, Stage.CONSTRAIN)
    async with served(Broken(), tmp_path, *stages) as listed, planner_side({"external_plugins": listed}) as side:
        assert await side.tick(OWN) == {"decode": 3}
        assert "INTERNAL: KeyError: 'on purpose'" in side.row("all-propose")["trouble"]
        assert "something of type int is no answer of constrain" in side.row("all-constrain")["trouble"]


async def test_a_plugin_that_is_not_taken_ends_with_the_reason(tmp_path: Path) -> None:
    spec = PluginSpec("old", Stage.PROPOSE, protocol_version="0.1")
    async with planner_side({"gateway": {"enabled": True}}) as side:
        with pytest.raises(RegistrationRefused, match="protocol_version_unsupported"):
            await serve(Everything(), spec, listen=f"unix://{tmp_path}/p.sock", gateway=side.gateway)
    with pytest.raises(DynamoError, match="cannot listen"):
        await serve(Everything(), spec, listen=f"unix://{tmp_path}/no/folder/p.sock")


async def test_it_leaves_when_it_is_cancelled(tmp_path: Path) -> None:
    async with planner_side({"gateway": {"enabled": True}}) as side:
        spec = PluginSpec("mine", Stage.PROPOSE)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        listen = f"unix://{tmp_path}/p.sock"
        serving = asyncio.ensure_future(
            serve(Everything(), spec, listen=listen, gateway=side.gateway, ready=ready.set_result)
        )
        await ready
        assert _known(side) == ["mine"]
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert _known(side) == []


def _known(side: PlannerSide) -> list[str]:
    return [row.plugin_id for row in side.service.rows()]
