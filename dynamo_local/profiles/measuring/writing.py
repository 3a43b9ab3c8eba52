"""Writes a measured profile: Dynamo's two files, and what is kept of a run that is not over."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.errors import ConfigError
from dynamo_local.profiles.measuring.plan import Measured, Progress, Rules
from dynamo_local.profiles.measuring.points import Kind, Point
from dynamo_local.profiles.measuring.statistics import Sample
from dynamo_local.profiles.reading import DecodePoints, PrefillPoints

KEPT = "measuring.json"
"""What was measured so far: for `--resume`."""


def write_npz(folder: Path, prefill: PrefillPoints, decode: DecodePoints) -> None:
    """As Dynamo's profiler names and measures them; of a side that was not measured, nothing. OSError says why it
    cannot be."""
    if prefill.isl:
        _arrays(
            folder / "selected_prefill_interpolation",
            prefill_isl=prefill.isl,
            prefill_ttft=prefill.ttft_ms,
            prefill_thpt_per_gpu=prefill.thpt_per_gpu,
        )
    if decode.kv_usage:
        _arrays(
            folder / "selected_decode_interpolation",
            x_kv_usage=decode.kv_usage,
            y_context_length=decode.context_length,
            z_itl=decode.itl_ms,
            z_thpt_per_gpu=decode.thpt_per_gpu,
            max_kv_tokens=[decode.max_kv_tokens],
        )


def _arrays(folder: Path, **arrays: Any) -> None:
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    found: dict[str, Any] = {name: np.array(values) for name, values in arrays.items()}
    np.savez(packed, **found)
    _replace(folder / "raw_data.npz", packed.getvalue())


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)


class _KeptPoint(msgspec.Struct, frozen=True):
    kind: Kind
    tokens: int
    requests: int
    cached: int
    samples: list[tuple[str, float, float, float, float]]
    spent_s: float
    failures: list[str]
    chunk: int = 0


class _Kept(msgspec.Struct, frozen=True):
    configuration_hash: str
    elapsed_s: float
    seed: int
    points: list[_KeptPoint]


def keep(folder: Path, progress: Progress, configuration_hash: str) -> None:
    """What is known so far, whole or not at all. OSError says why it cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    points = [
        _KeptPoint(
            point.kind,
            point.tokens,
            point.requests,
            point.cached,
            [(s.worker, s.at_s, s.value_ms, s.requests, s.kv_tokens) for s in progress.of(point).samples],
            progress.of(point).spent_s,
            list(progress.of(point).failures),
            point.chunk,
        )
        for point in progress.points
    ]
    kept = _Kept(configuration_hash, progress.elapsed_s, progress.rules.seed, points)
    _replace(folder / KEPT, msgspec.json.encode(kept))


def resumed(folder: Path, rules: Rules, configuration_hash: str) -> Progress:
    """What an earlier run in that folder left, under these rules; its seconds count. Raises `ConfigError`."""
    path = folder / KEPT
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        raise ConfigError(f"--resume: there is nothing to go on with, no {path}; leave it out") from None
    except OSError as error:
        raise ConfigError(f"--resume: {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--resume: {path} cannot be used: {error}; begin anew, without --resume") from error
    if kept.configuration_hash != configuration_hash:
        raise ConfigError(
            f"--resume: {path} was measured with another configuration of the engines; begin anew, without --resume"
        )
    known = {}
    for each in kept.points:
        point = Point(each.kind, each.tokens, each.requests, each.cached, each.chunk)
        known[point] = Measured(tuple(Sample(*values) for values in each.samples), each.spent_s, tuple(each.failures))
    return Progress(tuple(known), rules, known, kept.elapsed_s)
