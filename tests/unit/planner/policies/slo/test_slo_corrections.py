"""Factors on the profile that answers teach: one for the rule that looks ahead, one for the judge of the past."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dynamo_local.planner.policies.slo.corrections import Factors, Learning, Served, learned
from dynamo_local.planner.values import Ended

PROMPT_S, GAP_S = 0.2, 0.02


@dataclass(frozen=True)
class Constant:
    """An engine whose prompts take 0.2 s, and whose tokens come each 0.02 s, however many there are."""

    max_kv_tokens: int = 100_000

    def ttft_s(self, prompt_tokens: int) -> float:
        return PROMPT_S

    def itl_s(self, active_kv_tokens: int, mean_context: float) -> float:
        return GAP_S


def after(minutes: int, ttft_s: float, itl_s: float, share: float = 1.0) -> Factors:
    """The factors after so many minutes of two answers a second.

    A `share` of them has these latencies, the others have the profile's.
    """
    by, found = Learning(Constant(), 8192, 1.0, 0.1), Factors()
    ended = list[Ended]()
    for second in range(minutes * 60):
        for half in (0.0, 0.5):
            slow = len(ended) % 10 < 10 * share
            latencies = (ttft_s, itl_s) if slow else (PROMPT_S, GAP_S)
            ended.append(Ended(second + half, 1000, 51, *latencies))
        if second % 5 == 4:
            found = learned(found, ended[-240:], [Served(max(0.0, second - 300.0), second + 1.0, 2, 2)], by)
    return found


def test_an_engine_slower_than_its_profile_is_slow_for_both() -> None:
    found = after(10, PROMPT_S, 2 * GAP_S)
    assert found.decode == found.judged == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_pauses_while_prompts_wait_are_no_slow_engine_for_the_past(share: float) -> None:
    found = after(10, 0.7, 4 * GAP_S, share)
    assert found.decode > 1.2
    assert found.judged == 1.0
