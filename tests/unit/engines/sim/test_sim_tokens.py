"""The deterministic output of the simulated engine."""

from __future__ import annotations

import pytest

from dynamo_local.engines.sim.tokens import (
    TokenStream,
    expected_output,
    expected_output_length,
    expected_tokens,
    plan_output,
    prompt_digest,
)

GOLDEN = [471, 2031, 426, 664, 1622, 871, 264, 837]
GOLDEN_LENGTH = 93


def test_tokens_are_the_same_in_every_release() -> None:
    assert expected_tokens([1, 2, 3], 8) == GOLDEN
    assert expected_output_length([1, 2, 3]) == GOLDEN_LENGTH


def test_another_prompt_or_seed_gives_other_tokens() -> None:
    base = expected_tokens([1, 2, 3], 16)
    assert expected_tokens([1, 2, 4], 16) != base
    assert expected_tokens([1, 2], 16) != base
    assert expected_tokens([1, 2, 3], 16, seed=1) != base


def test_tokens_lie_in_the_range_given() -> None:
    assert set(expected_tokens([7], 500, token_low=10, token_high=13)) == {10, 11, 12}


def test_a_part_of_the_stream_equals_that_part_of_the_whole() -> None:
    whole = expected_tokens(range(5), 100)
    stream = TokenStream(prompt_digest(range(5)), token_low=259, token_high=2048)
    assert [*stream.take(0, 1), *stream.take(1, 30), *stream.take(31, 69)] == whole
    assert list(stream.take(40, 5)) == whole[40:45]
    assert stream.take(3, 0) == ()


def test_the_natural_length_has_the_mean_asked_for() -> None:
    lengths = [expected_output_length([n], mean_output_tokens=40) for n in range(2000)]
    assert min(lengths) == 20
    assert max(lengths) == 60
    assert sum(lengths) / len(lengths) == pytest.approx(40, rel=0.02)
    assert {expected_output_length([n], mean_output_tokens=1) for n in range(50)} == {1}


def test_output_stops_by_itself_or_at_max_tokens() -> None:
    natural = expected_output_length([9])
    assert expected_output([9], max_tokens=natural + 5)[1] == "stop"
    assert len(expected_output([9], max_tokens=natural + 5)[0]) == natural
    assert expected_output([9], max_tokens=natural)[1] == "stop"
    tokens, reason = expected_output([9], max_tokens=natural - 1)
    assert (len(tokens), reason) == (natural - 1, "length")


def test_ignore_eos_and_min_tokens_put_the_end_off() -> None:
    """vLLM's names, vLLM's meaning."""
    natural = expected_output_length([9])
    assert len(expected_output([9], max_tokens=500, ignore_eos=True)[0]) == 500
    assert len(expected_output([9], max_tokens=500, min_tokens=natural + 7)[0]) == natural + 7
    assert expected_output([9], max_tokens=10, min_tokens=20)[1] == "length"


def test_a_stop_token_ends_the_output_and_is_part_of_it() -> None:
    tokens = expected_tokens([9], 40, token_low=0, token_high=8)
    stream = TokenStream(prompt_digest([9]), token_low=0, token_high=8)
    stop = tokens[3]
    first = tokens.index(stop)
    assert plan_output(stream, natural=99, max_tokens=40, stop_token_ids=(stop,)) == (first + 1, "stop")
    later = next(i for i, token in enumerate(tokens) if token == stop and i >= 9)
    assert plan_output(stream, natural=99, max_tokens=40, stop_token_ids=[stop], min_tokens=10) == (later + 1, "stop")
    assert plan_output(stream, natural=99, max_tokens=40, stop_token_ids=[99]) == (40, "length")
