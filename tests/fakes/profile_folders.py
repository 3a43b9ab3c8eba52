"""Profile folders for tests: small ones that are made, in either format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

GPUS = 2
"""Of the engine that is made: throughput per GPU is half of the engine's."""
MAX_KV_TOKENS = 100_000


def prefill_arrays() -> dict[str, Any]:
    """10 ms and 20 us per token."""
    isl = [100.0, 1000.0, 4000.0, 8000.0]
    ttft_ms = [10 + 0.02 * tokens for tokens in isl]
    thpt = [tokens / ms * 1000 / GPUS for tokens, ms in zip(isl, ttft_ms, strict=True)]
    return {"prefill_isl": isl, "prefill_ttft": ttft_ms, "prefill_thpt_per_gpu": thpt}


def decode_itl_ms(kv_tokens: float, requests: float) -> float:
    """5 ms, 0.1 us per token of KV and 10 us per request."""
    return 5 + 1e-4 * kv_tokens + 0.01 * requests


def decode_arrays() -> dict[str, Any]:
    """Three contexts, with 1 request up to all that fit."""
    rows = []
    for context in (500.0, 2000.0, 8000.0):
        most = MAX_KV_TOKENS / context
        for requests in sorted({1.0, most / 4, most / 2, most}):
            itl_ms = decode_itl_ms(requests * context, requests)
            rows.append((requests * context / MAX_KV_TOKENS, context, itl_ms, requests / itl_ms * 1000 / GPUS))
    usage, contexts, itls, thpt = (list(column) for column in zip(*rows, strict=True))
    return {
        "x_kv_usage": usage,
        "y_context_length": contexts,
        "z_itl": itls,
        "z_thpt_per_gpu": thpt,
        "max_kv_tokens": [MAX_KV_TOKENS],
    }


def write_npz(folder: Path, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> str:
    """As the profiler writes it; the folder's name is what is given to a reader."""
    for kind, arrays in (("prefill", prefill or prefill_arrays()), ("decode", decode or decode_arrays())):
        part = folder / f"selected_{kind}_interpolation"
        part.mkdir(parents=True, exist_ok=True)
        np.savez(part / "raw_data.npz", **{name: np.array(values) for name, values in arrays.items()})
    return str(folder)


def write_json(folder: Path, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> str:
    """The other form, where `max_kv_tokens` is a plain number."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = decode_arrays() | {"max_kv_tokens": MAX_KV_TOKENS}
    for kind, arrays in (("prefill", prefill or prefill_arrays()), ("decode", decode or plain)):
        (folder / f"{kind}_raw_data.json").write_text(json.dumps(arrays))
    return str(folder)


SLOW_KV_TOKENS = 20_000


def slow_engine(folder: Path) -> str:
    """A profile that two cores can play: 100 ms and 0.4 ms per prompt token, 40 ms and 2 ms per request for a token."""
    isl = [50.0, 500.0, 2000.0]
    ttft_ms = [100 + 0.4 * tokens for tokens in isl]
    thpt = [tokens / ms * 1000 for tokens, ms in zip(isl, ttft_ms, strict=True)]
    rows = []
    for context in (100.0, 1000.0):
        most = SLOW_KV_TOKENS / context
        for count in sorted({1.0, 5.0, 10.0, 20.0} | {most}):
            itl_ms = 40 + 2 * count
            rows.append((count * context / SLOW_KV_TOKENS, context, itl_ms, count / itl_ms * 1000))
    usage, contexts, itls, decode_thpt = (list(column) for column in zip(*rows, strict=True))
    return write_json(
        folder,
        {"prefill_isl": isl, "prefill_ttft": ttft_ms, "prefill_thpt_per_gpu": thpt},
        {
            "x_kv_usage": usage,
            "y_context_length": contexts,
            "z_itl": itls,
            "z_thpt_per_gpu": decode_thpt,
            "max_kv_tokens": SLOW_KV_TOKENS,
        },
    )


def slow_mocker(path: Path) -> str:
    """The same engine as Dynamo's mocker reads it (`--planner-profile-data`): a grid of KV in use and context."""
    isl, kv, context = np.linspace(50, 2000, 14), np.linspace(0, SLOW_KV_TOKENS, 41), np.linspace(50, 1050, 21)
    np.savez(
        path,
        prefill_isl=isl,
        prefill_ttft_ms=100 + 0.4 * isl,
        decode_active_kv_tokens=kv,
        decode_context_length=context,
        decode_itl=40 + 2 * np.maximum(1.0, kv[:, None] / context[None, :]),
    )
    return str(path)
