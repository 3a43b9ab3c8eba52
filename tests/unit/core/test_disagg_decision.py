"""When a prefill goes remote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.routing.disagg import DisaggSettings, PrefillDecision, decide_prefill
from dynamo_local.core.types import Missing

SETTINGS = DisaggSettings(max_local_prefill_length=100, max_prefill_queue_size=2)


def decide(
    prompt_length: int = 1000,
    prefix_hit_rate: float = 0.0,
    queue_size: int | Missing = 0,
    prefill_workers: int = 1,
    settings: DisaggSettings = SETTINGS,
    conditional: bool = True,
) -> PrefillDecision:
    """`decide_prefill` with a long prompt, an empty queue and one worker."""
    return decide_prefill(
        prompt_length=prompt_length,
        prefix_hit_rate=prefix_hit_rate,
        queue_size=queue_size,
        prefill_workers=prefill_workers,
        settings=settings,
        conditional=conditional,
    )


@pytest.mark.parametrize(("prompt_length", "remote"), [(0, False), (99, False), (100, False), (101, True)])
def test_the_length_threshold_is_strict(prompt_length: int, remote: bool) -> None:
    assert decide(prompt_length=prompt_length).remote is remote


@pytest.mark.parametrize(("queue_size", "remote"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_queue_threshold_is_strict(queue_size: int, remote: bool) -> None:
    assert decide(queue_size=queue_size).remote is remote


@pytest.mark.parametrize(
    ("prompt_length", "hit_rate", "prefill_length", "remote"),
    [
        (1000, 0.5, 500, True),
        (1000, 0.9, 99, False),
        (1000, 1.0, 0, False),
        (202, 0.5, 101, True),
        (201, 0.5, 100, False),
    ],
)
def test_cached_tokens_do_not_count(prompt_length: int, hit_rate: float, prefill_length: int, remote: bool) -> None:
    """`int(prompt_length × (1 − prefix_hit_rate))`, truncated as in Dynamo: 1000 × (1 − 0.9) is 99."""
    decision = decide(prompt_length=prompt_length, prefix_hit_rate=hit_rate)
    assert (decision.prefill_length, decision.remote) == (prefill_length, remote)


def test_the_reason_is_worded_as_dynamo_words_it() -> None:
    settings = DisaggSettings(max_local_prefill_length=10, max_prefill_queue_size=2)
    decision = decide(prompt_length=1000, prefix_hit_rate=0.1, settings=settings)
    assert decision.reason == "Remote prefill: True (prefill length: 900/1000, prefill queue size: 0/2)"
    busy = decide(prompt_length=1000, queue_size=2, settings=settings)
    assert busy.reason == "Remote prefill: False (prefill length: 1000/1000, prefill queue size: 2/2)"


def test_an_unknown_queue_is_not_an_empty_one() -> None:
    """Missing is not zero: the prefill stays here, and the log says why."""
    decision = decide(queue_size=Missing("nats timeout"))
    assert not decision.remote
    assert decision.reason.endswith("prefill queue size: unknown/2): prefill queue size unknown: nats timeout")


def test_without_conditional_disagg_every_prefill_goes_remote() -> None:
    for queue_size in (0, 99, Missing("nats timeout")):
        decision = decide(prompt_length=1, queue_size=queue_size, conditional=False)
        assert decision.remote
        assert decision.reason.endswith("conditional-disagg is off")


@pytest.mark.parametrize("conditional", [True, False])
def test_without_prefill_workers_everything_stays_here(conditional: bool) -> None:
    """An entry that nobody pulls would only wait for its deadline."""
    decision = decide(prefill_workers=0, conditional=conditional)
    assert not decision.remote
    assert decision.reason.endswith("no prefill worker is registered")


@given(
    prompt_length=st.integers(0, 200_000),
    prefix_hit_rate=st.floats(0, 1),
    queue_size=st.integers(0, 50),
    max_length=st.integers(0, 200_000),
    max_queue=st.integers(0, 50),
)
def test_the_rule_as_the_issue_states_it(
    prompt_length: int, prefix_hit_rate: float, queue_size: int, max_length: int, max_queue: int
) -> None:
    settings = DisaggSettings(max_length, max_queue)
    expected = int(prompt_length * (1 - prefix_hit_rate)) > max_length and queue_size < max_queue
    assert decide(prompt_length, prefix_hit_rate, queue_size, settings=settings).remote is expected


@pytest.mark.parametrize("value", [-1, 1.5, True, "5", None])
def test_settings_refuse_what_is_no_count(value: object) -> None:
    with pytest.raises(ValueError, match="max_prefill_queue_size must be"):
        DisaggSettings(max_prefill_queue_size=value)  # type: ignore[arg-type]
