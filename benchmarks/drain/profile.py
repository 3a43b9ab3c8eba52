"""The engine of this benchmark: a large model that answers at about reading speed, on the H200 profile's prefill."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.drain.trace import PROMPT_SCALE
from dynamo_local.profile.reading import PROFILES

ITL_MS = 200.0
"""At speed 1, whatever the load: five tokens a second. An answer of 343 tokens, the trace's mean, takes 69 s."""
KV_TOKENS = 945_029
"""As the H200 profile's."""


def write_profile(folder: Path) -> Path:
    """A profile folder for the sim engine's option `profile`; prompts `PROMPT_SCALE` times shorter take as long."""
    with np.load(PROFILES / "dynamo_H200_TP1P_TP1D" / "selected_prefill_interpolation" / "raw_data.npz") as h200:
        prefill = {"prefill_isl": h200["prefill_isl"] / PROMPT_SCALE, "prefill_ttft": h200["prefill_ttft"]}
    usage, context = np.meshgrid([0.0, 1.0], [1.0, 131_072.0])
    decode = {
        "x_kv_usage": usage.ravel(),
        "y_context_length": context.ravel(),
        "z_itl": np.full(usage.size, ITL_MS),
        "max_kv_tokens": np.array([KV_TOKENS]),
    }
    for kind, arrays in (("prefill", prefill), ("decode", decode)):
        part = folder / f"selected_{kind}_interpolation"
        part.mkdir(parents=True)
        np.savez(part / "raw_data.npz", **arrays)
    return folder
