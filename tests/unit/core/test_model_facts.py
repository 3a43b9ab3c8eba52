"""Tests the memory of models by their configs. Published shapes, cut to the keys that count."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.model_facts import BadModelConfig, model_facts, tensor_bytes

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
MLA = {**PLAIN, "num_attention_heads": 128, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
INDEXED = {**MLA, "index_head_dim": 128, "index_topk": 2048}
MIXED = {
    **PLAIN,
    "num_hidden_layers": 36,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
GATED = {
    **PLAIN,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_key_value_heads": 2,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
}
HYBRID = {
    **PLAIN,
    "hybrid_override_pattern": "ME*-",
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
FP8_KV = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("config", "token", "windows", "state"),
    [
        (PLAIN, 32 * 2 * 8 * 128 * 2, 0, 0),
        ({**PLAIN, "num_key_value_heads": None}, 32 * 2 * 32 * 128 * 2, 0, 0),
        (MLA, 61 * 576 * 2, 0, 0),
        (INDEXED, 61 * (576 * 2 + 132), 0, 0),
        (
            {**INDEXED, "num_hidden_layers": 6, "index_topk_freq": 4, "index_skip_topk_offset": 3},
            6 * 1152 + 3 * 132,
            0,
            0,
        ),
        (MIXED, 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2, 0),
        ({**PLAIN, "sliding_window": 4096}, 0, 32 * 2 * 8 * 128 * 2, 0),
        ({**PLAIN, "sliding_window": 4096, "use_sliding_window": False}, 32 * 2 * 8 * 128 * 2, 0, 0),
        ({**PLAIN, "num_kv_shared_layers": 12}, 20 * 2 * 8 * 128 * 2, 0, 0),
        (GATED, 2 * 2 * 256 * 2, 0, 3 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4)),
        (HYBRID, 2 * 2 * 128 * 2, 0, (64 * 64 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 2),
    ],
)
def test_kv_and_state_are_counted_by_the_kind_of_each_layer(
    config: dict[str, Any], token: int, windows: int, state: int
) -> None:
    facts = model_facts({"text_config": config, "architectures": ["Any"]})
    assert (facts.token_bytes(), facts.token_bytes(windows=True), facts.state_bytes()) == (token, windows, state)
    assert facts.exact


def test_ranks_divide_the_heads_and_repeat_them_where_there_are_fewer() -> None:
    plain, mla = model_facts(PLAIN), model_facts(MLA)
    assert [plain.token_bytes(tp) for tp in (1, 2, 8, 16)] == [131072, 65536, 16384, 16384]
    assert mla.token_bytes(8) == mla.token_bytes(1)
    assert [tp for tp in range(1, 33) if plain.divides(tp)] == [1, 2, 4, 8, 16, 32]


def test_a_window_holds_no_more_than_itself_and_one_pass() -> None:
    facts = model_facts(MIXED)
    both = facts.token_bytes() + facts.token_bytes(windows=True)
    assert facts.sequence_bytes(100) == 100 * both
    assert facts.sequence_bytes(1000, batched=64) == 1000 * facts.token_bytes() + (127 + 64) * facts.token_bytes(
        windows=True
    )


def test_a_checkpoint_may_say_that_its_kv_takes_one_byte() -> None:
    assert model_facts(PLAIN, FP8_KV).token_bytes() == 65536
    scheme = {"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}}
    assert model_facts({**PLAIN, "quantization_config": scheme}).token_bytes() == 65536
    assert model_facts(PLAIN, kv_dtype="fp8").token_bytes() == 65536


def test_an_unknown_attention_is_counted_as_if_all_tokens_stayed() -> None:
    facts = model_facts({**PLAIN, "sliding_window": 128, "compress_ratios": [4, 128]})
    assert (facts.exact, facts.token_bytes()) == (False, 131072)


def test_rope_scaling_stretches_the_length_once() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert model_facts({**PLAIN, "max_position_embeddings": 32768, "rope_scaling": yarn}).max_len == 131072
    assert model_facts({**PLAIN, "rope_scaling": yarn}).max_len == 131072


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": "all"}, "must be a list"),
        ({"torch_dtype": "int3"}, "dtype is 'int3'"),
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern has 'X'"),
    ],
)
def test_a_value_that_no_model_has_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModelConfig, match=words):
        model_facts({**PLAIN, **wrong})


def test_tensors_end_where_their_header_says() -> None:
    assert tensor_bytes({"__metadata__": {}, "a": {"data_offsets": [0, 8]}, "b": {"data_offsets": [8, 24]}}) == 24
    with pytest.raises(BadModelConfig, match="'a' has no data_offsets"):
        tensor_bytes({"a": {"data_offsets": [8, 0]}})
