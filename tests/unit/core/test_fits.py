"""Tests whether a model fits, and how many engines of it do."""

from __future__ import annotations

import pytest

from dynamo_local.core.fits import Division, DoesNotFit, Gpus, Needs, divide, fit, kv_line, share, sum_line
from dynamo_local.core.model_facts import model_facts
from tests.unit.core.test_model_facts import MLA, PLAIN

H100 = Gpus(8, 85_520_809_984, "NVIDIA H100 80GB HBM3")
L4 = Gpus(2, 24_152_899_584, "NVIDIA L4")
SMALL, LARGE = (
    model_facts(PLAIN),
    model_facts({**PLAIN, "num_attention_heads": 64, "hidden_size": 8192, "num_hidden_layers": 80}),
)
GB = 10**9


def test_the_fewest_gpus_that_hold_the_whole_length_are_taken() -> None:
    assert fit(Needs(SMALL, 16 * GB), H100).tp == 1
    found = fit(Needs(LARGE, 141 * GB), H100)
    assert (found.tp, found.max_len, found.whole) == (4, 131072, True)
    assert found.shorter == (fit(Needs(LARGE, 141 * GB), Gpus(2, H100.memory_bytes)).max_len, 2)


def test_one_engine_keeps_within_the_memory_and_one_request_fits() -> None:
    found = fit(Needs(LARGE, 141 * GB), H100)
    held = found.weights_bytes + found.working_bytes + found.requests * found.request_bytes
    assert found.requests >= 1
    assert held <= H100.memory_bytes * 0.9


def test_without_room_for_the_models_length_the_longest_that_fits_is_offered() -> None:
    found = fit(Needs(SMALL, 16 * GB), Gpus(1, L4.memory_bytes))
    assert (found.whole, found.max_len % 256) == (False, 0)
    assert found.request_bytes <= found.kv_room_bytes
    longer = found.needs.facts.sequence_bytes(found.max_len + 256, 1, batched=found.batched)
    assert longer > found.kv_room_bytes


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(DoesNotFit) as refused:
        fit(Needs(LARGE, 141 * GB, max_len=131072), Gpus(2, H100.memory_bytes))
    text = str(refused.value)
    assert "weights 141.0 GB + working memory" in text
    assert "KV 42.9 GB for one request of 131,072 tokens > 2 × 85.5 GB × 0.9 = 153.9 GB" in text
    assert text.endswith("; 15,616 tokens fit: --max-model-len 15616")
    with pytest.raises(DoesNotFit, match="take more or larger GPUs, or a quantised copy of the model"):
        fit(Needs(LARGE, 141 * GB), Gpus(1, H100.memory_bytes))


def test_a_given_tensor_parallelism_is_kept_or_refused() -> None:
    assert fit(Needs(SMALL, 16 * GB, tp=2), H100).tp == 2
    with pytest.raises(DoesNotFit, match="does not divide the 32 attention heads; possible here: 1, 2, 4, 8"):
        fit(Needs(SMALL, 16 * GB, tp=3), H100)
    with pytest.raises(DoesNotFit, match="tensor-parallel-size is 16, but 8 GPUs are free"):
        fit(Needs(SMALL, 16 * GB, tp=16), H100)


def test_gpus_are_shared_so_that_each_model_has_one_engine_first() -> None:
    assert share(8, [1]) == [8]
    assert share(8, [4, 1]) == [1, 4]
    assert share(8, [1, 1, 1]) == [3, 3, 2]
    with pytest.raises(DoesNotFit, match=r"4 \+ 4 \+ 1 = 9 GPUs, but 8 are free"):
        share(8, [4, 4, 1])


def test_the_lines_say_the_sum() -> None:
    found = fit(Needs(model_facts(MLA), 700 * GB), Gpus(8, 150 * GB))
    assert found.tp == 8
    assert sum_line(found).startswith("150.0 GB × 0.9 - weights 87.5 GB - working memory")
    assert "70,272 bytes per token (per GPU)" in kv_line(found)


@pytest.mark.parametrize(
    ("engines", "chunk_ms", "itl_ms", "obstacles", "prefill"),
    [
        (4, 80.0, 20.0, (), 2),
        (4, 10.0, 20.0, (), 0),
        (4, None, 20.0, (), 0),
        (4, 80.0, None, (), 0),
        (1, 80.0, 20.0, (), 0),
        (4, 80.0, 20.0, ("nixl is not installed",), 0),
    ],
)
def test_roles_are_apart_where_a_prefill_pass_would_break_the_gap(
    engines: int, chunk_ms: float | None, itl_ms: float | None, obstacles: tuple[str, ...], prefill: int
) -> None:
    found = divide(engines, chunk_ms, itl_ms, obstacles)
    assert found == Division(prefill, engines - prefill, found.why)
