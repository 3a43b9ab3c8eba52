"""A plugin of ours beside a real graph: it registers, its word moves workers, and it leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.drivers.planned import DECODE, capacity, decided
from tests.drivers.plugin_processes import EXAMPLE, process, ready
from tests.drivers.served import Served, auntil

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

WORDS = (
    "--planner",
    "--Planner.scheduling.gateway.enabled=true",
    "--Planner.adjustment-interval=1.5",
    "--Planner.metric-pulling-interval=0.25",
    "--Planner.min-gpu-budget=1",
)


def plugins(served: Served) -> dict[str, Any]:
    """`dynamo planner plugins --json`."""
    done = served.cli("planner", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.full
async def test_a_plugin_has_a_say_while_it_is_there() -> None:
    with Served(*WORDS) as served:
        served.start()
        gateway = plugins(served)["gateway"]
        words = ("--listen", f"unix://{served.folder}/p.sock", "--gateway", gateway, "--first", "0", "--last", "24")
        async with process(str(EXAMPLE), *words, "--workers", "3") as plugin:
            await ready(plugin)
            await auntil(lambda: capacity(served)[DECODE] == 3, 60.0, what=served.states)
            (row,) = plugins(served)["plugins"]
            assert (row["plugin_id"], row["circuit_state"], row["trouble"]) == ("office-hours", "CLOSED", None)
            assert "office-hours" in served.cli("planner", "plugins").stdout
            rules = {reason["rule"] for record in decided(served) for reason in record["decision"]["reasons"]}
            assert "overridden" in rules
            plugin.terminate()
            assert await asyncio.wait_for(plugin.wait(), 30.0) == 0
        assert plugins(served)["plugins"] == []
        await auntil(lambda: capacity(served)[DECODE] == 1, 60.0, what=served.states)
