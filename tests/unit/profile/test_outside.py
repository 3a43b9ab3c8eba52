"""Tests what is made of a server that is measured over HTTP: its limits, and the gap between its tokens."""

from __future__ import annotations

import pytest

from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.profile.outside import NOTHING, Given, Unknown, gap_of, kv_tokens_of, limits_of, number_of
from dynamo_local.profile.points import Limits

VLLM = 'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{blocks}",engine="0"}} 1.0\n'


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (VLLM.format(size=16, blocks=1000), 16_000),
        (VLLM.format(size="None", blocks=1000), None),
        ("sglang:max_total_num_tokens 5000.0\n", 5000),
        ('vllm:cache_config_info{num_gpu_blocks="1000"} 1.0\n', None),
        ("up 1.0\n", None),
    ],
)
def test_the_kv_cache_is_read_from_the_servers_metrics(text, tokens):
    assert kv_tokens_of(Metrics(text)) == tokens


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("vllm", "serve", "--max-num-seqs", "64"), 64),
        (("vllm", "serve", "--max-num-seqs=32", "x"), 32),
        (("vllm", "serve", "--max-num-seqs"), None),
        (("vllm", "serve", "--max-num-seqs", "many"), None),
        (("vllm", "serve"), None),
    ],
)
def test_an_option_of_the_command_is_found_in_its_words(words, number):
    assert number_of(words, ("--max-num-seqs",)) == number


def test_what_is_given_goes_before_what_the_server_and_its_command_say():
    """And a pass is as large as the command says, else as usual."""
    told = {"max_kv_tokens": 16_000, "context_length": 4096}
    words = ("serve", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048")
    assert limits_of(told, words, NOTHING) == Limits(16_000, 4096, 8, 2048)
    assert limits_of(told, words, Given(9000, 512, 4)) == Limits(9000, 512, 4, 2048)
    assert limits_of({**told, "max_num_seqs": 16}, (), NOTHING) == Limits(16_000, 4096, 16, 8192)


def test_what_nobody_says_is_named_with_its_option():
    found = limits_of({"context_length": 4096}, (), NOTHING)
    assert found == Unknown(("--kv-tokens", "--max-num-seqs"))
    assert str(found) == (
        "does not say how many tokens its KV cache holds and how many requests it runs at once; "
        "give --kv-tokens N and --max-num-seqs N"
    )
    assert "its longest sequence; give --context-length N" in str(Unknown(("--context-length",)))


def test_the_gap_is_that_of_the_time_in_which_all_streams_decode():
    alone = [0.0, 0.1, 0.2, 0.3]
    first = [*alone, 1.0, 2.0, 3.0, 4.0]
    second = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 6.1, 6.2]
    found = gap_of([first, second], 8)
    assert found.itl_s == pytest.approx(1.0)
    assert found.tokens == pytest.approx((1 + 5.5 + 1 + 1.5) / 2)


def test_a_frame_of_several_tokens_counts_as_all_of_them():
    assert gap_of([[0.0, 1.0, 2.0, 3.0, 4.0]], 9).itl_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "streams",
    [[], [[1.0]], [[0.0, 1.0], [2.0, 3.0]], [[0.0, 1.0, 2.0], [1.5, 1.6]]],
    ids=["none", "one", "apart", "few"],
)
def test_streams_that_never_decoded_together_have_no_gap(streams):
    """None, and no number that would be wrong."""
    assert gap_of(streams, 3) is None
