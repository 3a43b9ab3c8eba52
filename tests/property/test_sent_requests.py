"""Tests what was in flight at a moment, by the requests that a Processor has sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.routing.choice import ENDED_KEPT_S, SentRequests

STEPS = st.lists(
    st.tuples(st.sampled_from(("send", "end", "sample", "ask")), st.floats(0.0, 0.3)), min_size=1, max_size=60
)


@given(steps=STEPS, many=st.integers(1, 3))
def test_the_count_at_a_sample_is_that_of_all_requests(steps: list[tuple[str, float]], many: int) -> None:
    """Whatever was sent, ended and asked in between: those that had been sent before it and had not ended."""
    sent, times, now_s, at_s = SentRequests(), dict[str, list[float]](), 0.0, 0.0
    for number, (step, passed_s) in enumerate(steps):
        now_s += passed_s
        if step == "send":
            for n in range(many):
                times[f"{number}-{n}"] = [now_s, float("inf")]
                sent.routed(1, f"{number}-{n}", 10, now_s)
        elif step == "end":
            open_ones = [name for name, (_, ended_s) in times.items() if ended_s == float("inf")]
            if open_ones:
                name = open_ones[number % len(open_ones)]
                times[name][1] = now_s
                sent.finished(1, name, now_s)
        elif step == "sample":
            at_s = now_s
        elif now_s - at_s < ENDED_KEPT_S:
            assert sent.count_at(1, at_s) == sum(sent_s < at_s < ended_s for sent_s, ended_s in times.values())
