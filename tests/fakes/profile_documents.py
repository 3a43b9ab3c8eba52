"""Shows what `dynamo profile` writes beside a profile's arrays, made."""

from __future__ import annotations

from typing import Any

from dynamo_local.profile.document import CertificateFacts, Document, EngineFacts, GpuFacts, PointFacts


def engine(**options: Any) -> EngineFacts:
    return EngineFacts(
        component="VllmWorker",
        engine="sim",
        version="1",
        gpus=1,
        options={"model": "sim-tiny", "sim.speed": 10.0, **options},
        max_kv_tokens=1000,
        context_length=500,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )


def document(**changes: Any) -> Document:
    point = PointFacts(
        kind="prefill",
        tokens=100,
        cached=0,
        requests=1.0,
        kv_tokens=0.0,
        mean_ms=10.0,
        half_width_ms=0.1,
        repetitions=[9.9, 10.0, 10.1],
        workers=["w", "w", "w"],
    )
    values: dict[str, Any] = {
        "format": 1,
        "date": "2026-11-23T00:00:00+00:00",
        "seconds": 1.0,
        "configuration_hash": "x",
        "engines": {"agg": engine()},
        "gpus": [GpuFacts("H200", "GPU-0")],
        "driver": None,
        "versions": {"sim": "1"},
        "points": [point],
        "fit": {},
        "end_to_end": [],
        "actions": {"VllmWorker": {"cold": 2.0}},
        "noticed": ["something"],
        "certificate": CertificateFacts(state="uncertified", where=["trace: none"], held_out={}, trace=[]),
        **changes,
    }
    return Document(**values)
