"""gRPC plugins as processes of their own: our example, on a socket and on a port; who dies; who is hostile."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo_local.planner.plugins.registration import FAILURES_MAX, CircuitState
from dynamo_local.planner.values import Proposal
from tests.drivers.plugin_processes import EXAMPLE, HOSTILE, PlannerSide, planner_side, process, ready
from tests.fakes.planner.plugins import override

ALL_DAY = ("--first", "0", "--last", "24", "--workers", "5")
OPEN_GATEWAY = {"gateway": {"enabled": True}}
TOKEN = "a-token-of-the-test"
SECRET = {"auth": {"trusted_sources": ["static_secret"], "static_secrets": {"env:TEAM_A_TOKEN": "team-a"}}}
ON_A_PORT = {"gateway": {"enabled": True, "listen": "127.0.0.1:0", "allow_insecure": True}}
OWN = Proposal("builtin_load_propose", 10, override(decode=3))


async def test_our_example_registers_is_heard_and_leaves() -> None:
    async with planner_side(OPEN_GATEWAY) as side:
        words = ("--listen", f"unix://{side.folder}/p.sock", "--gateway", side.gateway, *ALL_DAY)
        async with process(str(EXAMPLE), *words) as plugin:
            await ready(plugin)
            assert await side.tick(OWN) == {"decode": 5}
            assert side.row("office-hours")["transport"] == "unix"
            plugin.terminate()
            assert await asyncio.wait_for(plugin.wait(), 30.0) == 0
        assert side.row("office-hours") == {}
        assert await side.tick(OWN) == {"decode": 3}


async def test_a_plugin_that_the_configuration_names_may_come_later_than_the_planner(tmp_path: Path) -> None:
    socket = f"unix://{tmp_path}/p.sock"
    named = {"plugin_id": "office-hours", "plugin_type": "propose", "endpoint": socket}
    async with planner_side({"external_plugins": [named]}) as side:
        assert await side.tick(OWN) == {"decode": 3}
        assert "UNAVAILABLE" in side.row("office-hours")["trouble"]
        async with process(str(EXAMPLE), "--listen", socket, *ALL_DAY) as plugin:
            await ready(plugin)
            await until_it_says({"decode": 5}, side)
            assert side.row("office-hours")["trouble"] is None


async def until_it_says(targets: dict[str, int], side: PlannerSide) -> None:
    """Ticks until they come to that: gRPC pauses before it connects again."""
    async with asyncio.timeout(60.0):
        while await side.tick(OWN) != targets:
            await asyncio.sleep(0.5)


async def test_the_gateways_socket_is_this_users_alone() -> None:
    async with planner_side(OPEN_GATEWAY) as side:
        assert stat.S_IMODE(Path(side.gateway.removeprefix("unix://")).stat().st_mode) == 0o600


@pytest.mark.parametrize(("token", "taken"), [(TOKEN, True), ("another-token", False), ("", False)])
async def test_on_a_port_only_who_shows_the_token_comes_in(token: str, taken: bool) -> None:
    transport = {"transport": {"allow_insecure_grpc": True}}
    async with planner_side(ON_A_PORT, {**SECRET, **transport}, TEAM_A_TOKEN=TOKEN) as side:
        words = ("--listen", "127.0.0.1:0", "--gateway", side.gateway, *ALL_DAY)
        async with process(str(EXAMPLE), *words, env={"PLUGIN_TOKEN": token}) as plugin:
            if taken:
                await ready(plugin)
                assert side.row("office-hours")["transport"] == "grpc"
                assert await side.tick() == {"decode": 5}
            else:
                assert await asyncio.wait_for(plugin.wait(), 60.0) == 1
                assert side.row("office-hours") == {}


async def test_a_killed_plugin_says_nothing_and_its_successor_takes_its_place() -> None:
    async with planner_side(OPEN_GATEWAY) as side:
        words = (str(EXAMPLE), "--listen", f"unix://{side.folder}/p.sock", "--gateway", side.gateway, *ALL_DAY)
        async with process(*words) as plugin:
            await ready(plugin)
            assert await side.tick(OWN) == {"decode": 5}
            plugin.kill()
            await plugin.wait()
            for _ in range(FAILURES_MAX):
                assert await side.tick(OWN) == {"decode": 3}
            assert side.circuit("office-hours") is CircuitState.OPEN
            assert any("office-hours failed 5 times in a row" in text for text in side.told)
        async with process(*words) as again:
            await ready(again)
            assert side.circuit("office-hours") is CircuitState.CLOSED
            assert await side.tick(OWN) == {"decode": 5}


async def test_a_plugin_registers_again_where_the_planner_has_forgotten_it() -> None:
    async with planner_side(OPEN_GATEWAY) as side:
        words = ("--listen", f"unix://{side.folder}/p.sock", "--gateway", side.gateway, *ALL_DAY)
        async with process(str(EXAMPLE), *words) as plugin:
            await ready(plugin)
            side.service.registry.remove("office-hours", "test")
            async with asyncio.timeout(60.0):
                while side.row("office-hours") == {}:
                    await asyncio.sleep(0.02)


@asynccontextmanager
async def hostile(mode: str) -> AsyncIterator[PlannerSide]:
    """A planner's side, with a hostile plugin of PROPOSE that the configuration names."""
    async with planner_side() as empty:
        plugin = {"plugin_id": "bad", "plugin_type": "propose", "endpoint": f"unix://{empty.folder}/h.sock"}
        registration = {"transport": {"request_timeout_seconds": 1.0 if mode == "slow" else 30.0}}
        side = PlannerSide(empty.folder, {"external_plugins": [plugin]}, registration)
        async with process(str(HOSTILE), f"{empty.folder}/h.sock", mode) as made:
            assert made.stdout is not None
            assert await asyncio.wait_for(made.stdout.readline(), 60.0) == b"ready\n"
            await side.service.start()
            try:
                yield side
            finally:
                await side.service.stop()


@pytest.mark.parametrize(
    ("mode", "trouble"),
    [
        ("garbage", "are no ProposeStageResponse"),
        ("oversized", "RESOURCE_EXHAUSTED"),
        ("negative", "replicas is -3"),
        ("huge", "replicas is 2147483647"),
        ("unknown-type", "type is 77"),
        ("many", "1000 targets"),
        ("slow", "no answer within 1 s"),
        ("abort", "INTERNAL: no\\x1b[2J\\nxxx"),
        ("exit", "UNAVAILABLE"),
        ("refuses-bootstrap", "Bootstrap is refused: not today"),
    ],
)
async def test_a_hostile_plugin_costs_its_own_word_and_no_more(mode: str, trouble: str) -> None:
    """The policy's proposal stands, the loop goes on meanwhile, and the row says what was wrong, in one line."""
    async with hostile(mode) as side:
        other = asyncio.ensure_future(asyncio.sleep(0.0))
        assert await side.tick(OWN) == {"decode": 3}
        assert other.done()
        shown = side.row("bad")["trouble"]
        assert trouble in shown
        assert shown.isprintable()
        assert len(shown) < 1000


@pytest.mark.parametrize("mode", ["no-replicas", "empty"])
async def test_an_answer_that_says_nothing_is_no_opinion(mode: str) -> None:
    async with hostile(mode) as side:
        assert await side.tick(OWN) == {"decode": 3}
        assert side.row("bad")["trouble"] is None
