"""Dynamo 1.x's prefill and decode mockers apart: both roles come and go under load."""

from __future__ import annotations

import pytest

from dynamo_local.cli.common import ArbiterRefused
from tests.drivers.scaled import ascale, command, names, settled
from tests.drivers.served import auntil
from tests.dynamo1x.dynamo_graphs import graph, instances, listed, load

pytestmark = [pytest.mark.timeout(500)]

START_S = 120.0
LEAVE_S = 120.0


@pytest.mark.full
async def test_both_roles_are_scaled_under_load_without_a_failed_request() -> None:
    with graph("disagg").started() as served:
        await listed(served)
        async with load(served) as found:
            await ascale(served, "Decode", "4")
            await ascale(served, "Prefill", "3")
            await auntil(
                lambda: (len(names(served, "Decode")), len(names(served, "Prefill"))) == (4, 3),
                2 * START_S,
                what=served.states,
            )
            assert (len(instances(served)), len(instances(served, "prefill"))) == (4, 3)
            await found.more(150)
            await ascale(served, "Decode", "1")
            await ascale(served, "Prefill", "1")
            await auntil(
                lambda: (names(served, "Decode"), names(served, "Prefill")) == (["Decode"], ["Prefill"]),
                LEAVE_S,
                what=served.states,
            )
            await settled(served, LEAVE_S)
            await found.more(500 - min(found.right, 490))
            with pytest.raises(ArbiterRefused, match="last"):
                command(served, "drain", name="dynamo_Prefill")
        found.check(500)
