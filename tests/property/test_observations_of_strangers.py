"""Whatever comes over NATS or ZeroMQ in place of a pass or an answer: it is none, or it is within its bounds."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.transport.fpm import decode_pass, encode_pass
from dynamo_local.transport.observation import parse_answer
from dynamo_local.transport.passes import seal, unframe, unseal

COUNTS = st.integers(0, 2**53)
FLOATS = st.floats(0, allow_nan=False, allow_infinity=False)
REQUESTS = st.builds(Requests, COUNTS, COUNTS, FLOATS, COUNTS, COUNTS, COUNTS, FLOATS)
QUEUED = st.builds(Requests, COUNTS, COUNTS, FLOATS, st.just(0), COUNTS, COUNTS, FLOATS)
PASSES = st.builds(
    ForwardPass,
    st.builds(EngineId, st.integers(0, 2**64 - 1).map(str), st.integers(0, 65535)),
    COUNTS,
    FLOATS,
    REQUESTS,
    QUEUED,
)
NAMES = (
    "version",
    "worker_id",
    "dp_rank",
    "counter_id",
    "wall_time",
    "scheduled_requests",
    "queued_requests",
    "payload",
)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(["", "7", "generate", "ä"])
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)
ANSWER_NAMES = ("watcher", "component", "epoch", "up_s", "counters", "passes", "missed", "limits")


def maps(names: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Maps with some of these names and anything behind them."""
    return st.dictionaries(st.sampled_from(names), ANYTHING, max_size=len(names))


@given(PASSES)
def test_every_pass_comes_back_as_it_was(passed: ForwardPass) -> None:
    assert decode_pass(encode_pass(passed)) == passed
    sealed = seal(encode_pass(passed), publisher_id=1, sequence=2, wall_s=3.0)
    assert unseal(sealed) == encode_pass(passed)


@given(st.binary(max_size=200) | maps(NAMES).map(msgspec.msgpack.encode))
def test_anything_is_a_pass_within_its_bounds_or_none(data: bytes) -> None:
    passed = decode_pass(data)
    if passed is None:
        return
    assert passed.engine.worker_id.isdecimal()
    assert 0 <= passed.engine.dp_rank <= 65535
    assert 0.0 <= passed.wall_time_s < math.inf
    for requests in (passed.scheduled, passed.queued):
        assert 0 <= requests.sum_prefill_tokens <= 2**53
        assert 0.0 <= requests.var_decode_kv_tokens < math.inf


@given(st.binary(max_size=200) | maps(NAMES).map(msgspec.msgpack.encode))
def test_anything_is_an_envelope_or_none(data: bytes) -> None:
    for payload in (unseal(data), unframe([b"topic", b"", b"", data])):
        assert payload is None or isinstance(payload, bytes)


@given(st.binary(max_size=200) | maps(ANSWER_NAMES).map(msgspec.msgpack.encode))
def test_anything_is_an_answer_or_none(data: bytes) -> None:
    answer = parse_answer(data, 100.0)
    assert answer is None or answer.up_since_s <= 100.0


@given(
    st.lists(st.tuples(st.floats(), st.binary(max_size=40)), max_size=4),
    st.dictionaries(st.text("ab", max_size=3), st.floats(), max_size=4),
)
def test_passes_and_counters_in_an_answer_may_be_nonsense(passes: list[Any], counters: dict[str, float]) -> None:
    said = {"watcher": "w", "component": "c", "epoch": "e", "up_s": 1.0, "counters": counters, "passes": passes}
    answer = parse_answer(msgspec.msgpack.encode(said), 100.0)
    finite = all(0.0 <= number < math.inf for number in [*counters.values(), *(age_s for age_s, _ in passes)])
    assert (answer is not None) is finite
