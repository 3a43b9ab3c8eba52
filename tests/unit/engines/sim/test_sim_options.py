"""The simulated engine's options: what is refused, and what they say of a transfer."""

from __future__ import annotations

import pytest

from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import ConfigError


def test_options_say_which_one_is_wrong_and_why() -> None:
    assert SimOptions.from_mapping({"max-num-seqs": 4, "speed": 10}) == SimOptions(max_num_seqs=4, speed=10)
    for mapping, message in [
        ({"max-num-seq": 4}, "no option 'max-num-seq'; did you mean 'max_num_seqs'"),
        ({"zzz": 4}, "the options are: accept_length"),
        ({"speed": 0}, "'speed' must be above 0, not 0"),
        ({"speed": "fast"}, "'speed' must be a number, not 'fast'"),
        ({"speed": True}, "'speed' must be a number, not True"),
        ({"speed": float("nan")}, "'speed' must be a number, not nan"),
        ({"block_size": 1.5}, "'block_size' must be a whole number"),
        ({"num_gpu_blocks": 0}, "'num_gpu_blocks' must be 1 or more"),
        ({"coalesce_passes": 1}, "'coalesce_passes' must be true or false"),
        ({"model": ""}, "'model' must be a text"),
        ({"token_low": 9, "token_high": 9}, "'token_high' must be above token_low"),
        ({"start_up_s": -1}, "'start_up_s' must be 0 or more"),
    ]:
        with pytest.raises(ConfigError, match=message):
            SimOptions.from_mapping(mapping)


def test_a_transfer_takes_latency_and_size_over_bandwidth() -> None:
    options = SimOptions(kv_bytes_per_token=1000, kv_transfer_bytes_per_s=1e6, kv_transfer_latency_s=0.5, speed=2)
    assert options.transfer_s(1000) == pytest.approx(0.75)
