"""A worker that tries out a hand-off before it decodes: how long each prefill worker is given, and who is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.components.handoffs import LEAST_S, MOST_S, NEXT_AFTER_S, UNKNOWN_S, Canary, HandoffTimes
from dynamo_local.errors import EngineError, FlipFailed
from dynamo_local.ports import EngineOutput, EngineRequest
from tests.fakes.data_plane.endpoints import FakeEndpointClient

REPLY = {"kv_transfer_params": {"remote_engine_id": "other"}}


class Decoder:
    """An engine that takes KV and decodes; `pull_s` is how long that takes."""

    def __init__(self, pull_s: float = 0.0) -> None:
        self.pull_s = pull_s
        self.decoded: list[EngineRequest] = []

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        await asyncio.sleep(self.pull_s)
        self.decoded.append(request)
        yield EngineOutput((1, 2), "length", 0)


async def usable(_params: Mapping[str, Any]) -> None:
    """Every KV."""


def answers(after_s: float, error: Exception | None = None) -> Any:
    """A prefill worker's `canary`."""

    async def handler(_payload: Any, _context: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(after_s)
        if error is not None:
            raise error
        yield REPLY

    return handler


def sung(
    handlers: Mapping[int, Any], *, times: HandoffTimes | None = None, engine: Decoder | None = None
) -> tuple[float, FakeEndpointClient, str]:
    """Seconds (of virtual time), who was asked, and why it failed."""

    async def main() -> tuple[float, FakeEndpointClient, str]:
        client, loop, why = FakeEndpointClient(handlers), asyncio.get_running_loop(), ""
        began_s = loop.time()
        try:
            await Canary(engine or Decoder(), client, usable, times=times or HandoffTimes()).sing()  # type: ignore[arg-type]
        except FlipFailed as error:
            why = str(error)
        took_s = loop.time() - began_s
        await client.close()
        return took_s, client, why

    return run_virtual(main())


def test_an_engine_that_is_known_to_be_slow_is_given_more_time() -> None:
    """On two busy cores hand-offs of real vLLM took 2.5 s; a constant of two seconds called every flip off."""
    times = HandoffTimes()
    times.pulls.append(1.5)
    took_s, _, why = sung({1: answers(3.0)}, times=times)
    assert (why, took_s) == ("", 3.0)
    assert list(times.pulls) == [1.5, 3.0]


def test_a_quick_engine_waits_for_a_dead_peer_no_longer_than_before() -> None:
    times = HandoffTimes()
    times.pulls.append(0.01)
    took_s, _, why = sung({1: answers(60.0)}, times=times)
    assert took_s == LEAST_S
    assert "nothing within 2.0 s" in why
    assert "took 0.01 s at most" in why


def test_the_first_hand_off_is_given_more_time_and_a_try_that_failed_makes_the_next_one_longer() -> None:
    """Two engines make each other's acquaintance at their first; what a try has waited for is known to be needed."""
    times = HandoffTimes()
    assert times.patience_s() == UNKNOWN_S
    took_s, _, why = sung({1: answers(60.0)}, times=times)
    assert took_s == UNKNOWN_S
    assert "a later try is given more time" in why
    assert times.patience_s() == MOST_S


def test_the_time_follows_prefills_that_were_computed_here_too() -> None:
    """A prefill worker has seen no pull, but knows how long a pass takes on this host."""
    times = HandoffTimes()
    times.prefills.extend([0.2, 2.0])
    assert times.patience_s() == 6.0
    times.prefills.append(100.0)
    assert times.patience_s() == MOST_S


def test_who_is_slow_is_not_given_up_when_the_next_one_is_asked() -> None:
    """The one of two that is asked first is dead, and the other one slow: what has begun goes on."""
    took_s, client, why = sung({1: answers(60.0), 2: answers(3.0)})
    assert why == ""
    assert took_s in (3.0, NEXT_AFTER_S + 3.0)
    assert len(client.calls) == 2


def test_one_that_answers_at_once_is_the_only_one_that_is_asked() -> None:
    _, client, why = sung({1: answers(0.0), 2: answers(0.0)})
    assert (why, len(client.calls)) == ("", 1)


def test_a_refusal_lets_the_next_one_be_asked_at_once() -> None:
    broken = answers(0.0, EngineError("no memory"))
    took_s, client, why = sung({1: broken, 2: broken})
    assert took_s == 0.0
    assert len(client.calls) == 2
    assert why.count("no memory") == 2


def test_all_of_it_ends_within_the_deadline_of_a_flip() -> None:
    took_s, _, why = sung({number: answers(60.0) for number in range(9)})
    assert took_s == pytest.approx(MOST_S)
    assert "nothing within 8 s" in why
