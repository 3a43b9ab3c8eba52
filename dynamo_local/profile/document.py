"""`profile.json`: what was measured, of what, where, when, and how far it may be believed.

It stands beside Dynamo's files, which have no place for any of it. Readers of those need not know it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.errors import ConfigError
from dynamo_local.profile.points import Kind, Point
from dynamo_local.profile.reading import PROFILE_DOCUMENT, DecodePoints, PrefillPoints
from dynamo_local.profile.repetitions import Measured, Progress, Rules, Sample

FILE = PROFILE_DOCUMENT
FORMAT = 1


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the configuration that was measured. `options` are those by which its speed depends."""

    component: str
    engine: str
    version: str
    gpus: int
    options: dict[str, Any]
    max_kv_tokens: int
    context_length: int
    max_num_seqs: int
    max_num_batched_tokens: int


class PathFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of so many tokens, alone: its first token over HTTP, and at the engine; the same of a gap of tokens."""

    tokens: int
    ttft_ms: float
    engine_ttft_ms: float
    itl_ms: float | None
    engine_itl_ms: float | None


class GpuFacts(msgspec.Struct, frozen=True):
    """A device that was measured on."""

    name: str
    uuid: str


class PointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A measured point: the mean with the half width of its 95 % confidence interval, ms. `kv_tokens` and `requests`
    are what the engine really computed, in the mean; `repetitions` are all single values. `over`: `engine`, or `http`
    for a server that was measured from outside. `chunk`: tokens of the prompt that a mixed pass computed as well."""

    kind: str
    tokens: int
    cached: int
    requests: float
    kv_tokens: float
    mean_ms: float
    half_width_ms: float | None
    repetitions: list[float]
    workers: list[str]
    over: str = "engine"
    chunk: int = 0


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """GPU memory and main memory of one worker in one state. None: unknown."""

    vram_bytes: int | None
    host_bytes: int | None


class CertificateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How far it may be believed, and by what: relative errors."""

    state: str
    where: list[str]
    held_out: dict[str, float]
    trace: list[dict[str, Any]]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `profile.json`.

    `engines`: by role (prefill, decode). `actions`: seconds, by component and scaling option. `memory`: by
    component and state. `beyond_engine`: time of a first token over HTTP outside of the engine, ms: a fixed
    `overhead_ms`, and
    `per_token_ms` of the prompt, which is the hand-off's part.
    """

    format: int
    date: str
    seconds: float
    configuration_hash: str
    engines: dict[str, EngineFacts]
    gpus: list[GpuFacts]
    driver: str | None
    versions: dict[str, str]
    points: list[PointFacts]
    fit: dict[str, dict[str, float]]
    end_to_end: list[PathFacts]
    actions: dict[str, dict[str, float]]
    noticed: list[str]
    certificate: CertificateFacts
    memory: dict[str, dict[str, MemoryFacts]] = {}
    beyond_engine: dict[str, float] = {}

    @property
    def serving(self) -> EngineFacts | None:
        """The engine that gives answers: the aggregated one, else decode; None if only prefill was measured."""
        return self.engines.get("agg", self.engines.get("decode"))

    @property
    def cold_start_s(self) -> float | None:
        """The slowest component's cold start; None if none was measured."""
        return max((rungs["cold"] for rungs in self.actions.values() if "cold" in rungs), default=None)


def configuration_hash(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """A fingerprint of the engines that `described` names. Equal engines have equal fingerprints."""
    return hashlib.blake2b(json.dumps(engines, sort_keys=True).encode(), digest_size=16).hexdigest()


def described(engine: EngineFacts) -> dict[str, Any]:
    """The options of an engine that its speed depends on."""
    return {"engine": engine.engine, "gpus": engine.gpus, "options": engine.options}


def read_document(folder: Path) -> Document | None:
    """The document in a profile's folder. None if there is none, as in Dynamo's own. Raises `ConfigError`."""
    path = folder / FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {error.strerror}") from error
    try:
        found = msgspec.json.decode(text, type=Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the profile {path} cannot be used: {error}; measure it again (`dynamo profile`)") from error
    if found.format != FORMAT:
        raise ConfigError(f"the profile {path} has format {found.format}, and this version reads {FORMAT}")
    return found


def write_document(folder: Path, document: Document) -> None:
    """Whole or not at all. OSError says why it cannot be."""
    path = folder / FILE
    beside = path.with_name(f".{FILE}.{os.getpid()}")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    beside.replace(path)


def differences(
    document: Document,
    running: Mapping[str, Mapping[str, Any]],
    gpus: frozenset[str] | None = None,
    versions: Mapping[str, str] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] = {},
) -> list[str]:
    """Differences between the running engines and the measured ones, in words. None: the profile fits.

    `running`: role -> what `described` returns. A role that was not measured never fits. `gpus`: names of the devices
    (None: unknown). `versions` and `defaults` are those of the engines. An option that is not given has its default.
    """
    return [
        *_engines(document, running, defaults),
        *_gpus(document, gpus),
        *(
            f"{engine} is {versions[engine]} here and was {version}"
            for engine, version in document.versions.items()
            if versions and engine in versions and versions[engine] != version
        ),
    ]


def _engines(
    document: Document, running: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for role, here in running.items():
        if role not in document.engines:
            yield f"there are {role} engines here, and none was measured"
            continue
        there = described(document.engines[role])
        for name in ("engine", "gpus"):
            if there[name] != here[name]:
                yield f"{role}: {name} is {here[name]} here and was {there[name]}"
        old_defaults, new_defaults = defaults.get(there["engine"], {}), defaults.get(here["engine"], {})
        for name in sorted({*there["options"], *here["options"]}):
            old = there["options"].get(name, old_defaults.get(name))
            new = here["options"].get(name, new_defaults.get(name))
            if old != new:
                yield f"{role}: {name} is {_shown(new)} here and was {_shown(old)}"


def _gpus(document: Document, gpus: frozenset[str] | None) -> Iterator[str]:
    measured = {gpu.name for gpu in document.gpus}
    if gpus is not None and measured and not gpus <= measured:
        yield f"GPUs are {', '.join(sorted(gpus))} here and were {', '.join(sorted(measured))}"


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value) if isinstance(value, (dict, list)) else str(value)


# Writes a measured profile: Dynamo's two files, and the intermediate results of a run that is not finished.

KEPT = "measuring.json"
"""Intermediate results, for `--resume`."""


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
    """Write the results so far, atomically. Raises OSError."""
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
    """Results of an earlier run in that folder, made under the same rules. Its seconds count. Raises `ConfigError`."""
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
