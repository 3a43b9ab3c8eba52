"""Why: Dynamo's enums, the numbers, what it would have taken to do otherwise, and the words."""

from __future__ import annotations

import pytest

from dynamo_local.planner.policies.explain import explain
from dynamo_local.planner.values import Decision, Reason
from tests.fakes.planner.engines_seen import both_loops, decide, driver, load_loop, observation, sized, sla, traffic
from tests.fakes.planner.observations import PREFILL, pool

AT_8 = load_loop(max_gpu_budget=8)


def of(decision: Decision, component: str = PREFILL) -> Reason:
    (found,) = (reason for reason in decision.reasons if reason.component == component)
    return found


def line(decision: Decision, component: str = PREFILL) -> str:
    (found,) = (one for one in explain(decision) if one.startswith(component))
    return found


def test_a_step_up_in_words() -> None:
    assert line(decide(load_loop(), 1, 1, queues=[30_000])) == (
        "PrefillWorker +1 (scale_up): TTFT on the best engine 720.3 > 500; "
        "at TTFT on the best engine 500 it would have held"
    )


def test_a_refused_step_down_in_words() -> None:
    said = line(decide(load_loop(), 2, 1, queues=[9_000, 9_000]))
    assert said.startswith(
        "PrefillWorker holds (scale_down_refused_consolidation): "
        "the wait behind the queue, with one engine less, 380 > 335.728"
    )
    assert said.endswith("it would have gone -1")


def test_a_forecast_in_words() -> None:
    """With the requests at which one worker less would have done."""
    said = line(sized(sla(), 7200))
    assert said == (
        "PrefillWorker +1 (scale): 40 requests/s are expected, a worker takes 23.53: 2 needed; "
        "the throughput loop's bound is 2; at predicted requests 4235 it would have held"
    )


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("publish no forward-pass metrics", decide(load_loop(), 1, 1, queues=[None], kvs=[None])),
        ("metrics of 1 engines, where 2 are ready", decide(load_loop(), 2, 1, queues=[0, None])),
        ("workers start or leave (1 ready of 2)", decide(load_loop(), pool(PREFILL, 1, coming=1), 1, queues=[30_000])),
        ("0 samples of at least 5", decide(load_loop(), 1, 1, models={})),
        ("not known yet, or what requests look like", sized(sla(), 0, 1, 1)),
        ("wanted, 8 GPUs counted, max-gpu-budget 8", decide(AT_8, 4, 4, queues=[30_000] * 4, kvs=[100_000] * 4)),
    ],
)
def test_every_hold_is_said(said: str, found: Decision) -> None:
    assert said in line(found)


def test_a_budget_that_held_a_step_says_how_much_it_would_have_taken() -> None:
    held = decide(AT_8, 4, 4, queues=[30_000] * 4, kvs=[100_000] * 4)
    other = of(held).otherwise
    assert other is not None
    assert (other.name, other.value, other.needed, other.step) == ("max_gpu_budget", 8, 9, 1)


def test_both_loops_are_told_under_dynamos_names() -> None:
    drives = driver(both_loops())
    while drives.next_at_s < 180.0:
        between = drives.tick_now(observation(drives.next_at_s))
    assert between is not None
    assert of(between).decisions == {"load_scaling_decision": "no_change", "throughput_scaling_decision": "unset"}
    both = drives.tick_now(observation(180.0, 2, 3, seen=traffic(180.0, 7200)))
    assert both is not None
    assert of(both).decisions == {
        "load_scaling_decision": "scale_down_capped_by_throughput",
        "throughput_scaling_decision": "set_lower_bound",
    }
    assert of(both).otherwise is not None
    assert (of(both).otherwise.name, of(both).otherwise.needed) == ("throughput_lower_bound", 1)  # type: ignore[union-attr]
    alone = sized(sla(), 7200)
    assert of(alone).decisions == {"load_scaling_decision": "disabled", "throughput_scaling_decision": "scale"}


@pytest.mark.parametrize("num_req", [900, 4000, 7200, 20_000])
@pytest.mark.parametrize("ready", [1, 2, 4])
def test_the_requests_that_would_have_decided_otherwise_do(num_req: int, ready: int) -> None:
    """Fed back, the step is what was said; one request short of it, it still goes the way that it went."""
    decision = sized(sla(), num_req, ready, ready)
    for reason in decision.reasons:
        other = reason.otherwise
        if other is None or other.name != "predicted_num_req":
            continue
        short = other.needed + (1 if other.needed < num_req else -1)
        assert of(sized(sla(), other.needed, ready, ready), reason.component).step == other.step != reason.step
        still = of(sized(sla(), short, ready, ready), reason.component).step
        assert (still > 0, still < 0) == (reason.step > 0, reason.step < 0)


def test_a_target_that_cannot_be_kept_is_said() -> None:
    said = line(sized(sla(ttft_ms=20.0), 7200))
    assert "no batch keeps the target: sized for the fastest" in said
