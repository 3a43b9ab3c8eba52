"""A profile that was measured here, read by Dynamo's own planner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.profile.document import write_npz
from dynamo_local.profile.fit import decode_points, prefill_points
from dynamo_local.profile.points import Kind, Limits, sweep
from dynamo_local.profile.repetitions import Progress, Rules, measured
from tests.fakes.known_engine import KnownEngine, measure


def test_dynamos_own_reader_takes_the_files_and_their_units(tmp_path: Path):
    limits = Limits(400_000, 16_384, 256)
    progress = Progress(tuple(sweep(limits, (Kind.PREFILL, Kind.DECODE))), Rules())
    known = measured(measure(progress, KnownEngine(noise=0.0)))
    prefill, decode = prefill_points(known, 1), decode_points(known, limits.max_kv_tokens, 1)
    write_npz(tmp_path, prefill, decode)
    script = Path(__file__).with_name("profile_reader.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    prompts = [(tokens, wall_s * 1000) for tokens, requests, _, wall_s in rows if not requests]
    assert prompts == [(isl, pytest.approx(ms)) for isl, ms in zip(prefill.isl, prefill.ttft_ms, strict=True)]
    loads = [(requests, kv, wall_s * 1000) for tokens, requests, kv, wall_s in rows if not tokens]
    assert len(loads) == len(decode.itl_ms)
    for (requests, kv, ms), usage, context, itl_ms in zip(
        loads, decode.kv_usage, decode.context_length, decode.itl_ms, strict=True
    ):
        assert kv == pytest.approx(usage * limits.max_kv_tokens, abs=1)
        assert requests == pytest.approx(kv / context, abs=0.5)
        assert ms == pytest.approx(itl_ms)
