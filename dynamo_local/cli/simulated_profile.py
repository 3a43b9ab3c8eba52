"""`dynamo simulate --profile FOLDER`: what a measured profile says of its engines beside their times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

START_UP_S = 30.0
"""Of a new worker, where nobody measured it."""


def with_measured(words: Mapping[str, Any]) -> dict[str, Any]:
    """The command's words with `start_up_s` and `engines`: options of the simulated engine, each as it was measured.

    What the user says counts more. Of a profile without `profile.json` nothing is known. Raises `ConfigError`.
    """
    from dynamo_local.profiles import profile_folder
    from dynamo_local.profiles.measuring.document import read_document

    name, start_up_s = words["profile"], words["start_up_s"]
    document = None if name is None else read_document(profile_folder(name))
    engine = None if document is None else document.engines.get("agg", document.engines.get("decode"))
    if document is None or engine is None:
        return {**words, "engines": {}, "start_up_s": START_UP_S if start_up_s is None else start_up_s}
    cold_s = [rungs["cold"] for rungs in document.actions.values() if "cold" in rungs]
    kv = engine.max_kv_tokens
    engines = {
        "block_size": next((size for size in (64, 32, 16, 8, 4, 2) if kv % size == 0), 1),
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": min(engine.context_length, kv),
    }
    measured_s = max(cold_s, default=START_UP_S)
    return {**words, "engines": engines, "start_up_s": measured_s if start_up_s is None else start_up_s}
