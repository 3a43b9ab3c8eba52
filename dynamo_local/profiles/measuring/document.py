"""`profile.json`: what was measured, of what, where, when, and how far it may be believed.

It stands beside Dynamo's files, which have no place for any of it. Readers of those need not know it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.errors import ConfigError
from dynamo_local.profiles.reading import PROFILE_DOCUMENT

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
    """What one worker holds in a state: GPU memory and main memory; None where it is not known."""

    vram_bytes: int | None
    host_bytes: int | None


class CertificateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How far it may be believed, and by what: relative errors."""

    state: str
    where: list[str]
    held_out: dict[str, float]
    trace: list[dict[str, Any]]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """All of `profile.json`. `engines` by role (prefill, decode); `actions` in seconds, by component and rung;
    `memory` by component and state. `beyond_engine`: what a first token over HTTP takes beyond the engine, in ms:
    `overhead_ms`, and `per_token_ms` of the prompt (a hand-off's part)."""

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


def configuration_hash(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """Of what `described` says of each role's engine: the same wherever the same engines are configured."""
    return hashlib.blake2b(json.dumps(engines, sort_keys=True).encode(), digest_size=16).hexdigest()


def described(engine: EngineFacts) -> dict[str, Any]:
    """What a configuration says of an engine, as far as its speed depends on it."""
    return {"engine": engine.engine, "gpus": engine.gpus, "options": engine.options}


def read_document(folder: Path) -> Document | None:
    """Of a profile's folder; None where it has none (Dynamo's own have none). Raises `ConfigError`."""
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
) -> list[str]:
    """What the engines that run have otherwise than those that were measured, in words; none: it fits.

    `running` has what `described` has, by role; a role that was not measured fits nothing. `gpus` are the names of the
    devices (None: not known), `versions` those of the engines.
    """
    return [
        *_engines(document, running),
        *_gpus(document, gpus),
        *(
            f"{engine} is {versions[engine]} here and was {version}"
            for engine, version in document.versions.items()
            if versions and engine in versions and versions[engine] != version
        ),
    ]


def _engines(document: Document, running: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for role, here in running.items():
        if role not in document.engines:
            yield f"there are {role} engines here, and none was measured"
            continue
        there = described(document.engines[role])
        for name in ("engine", "gpus"):
            if there[name] != here[name]:
                yield f"{role}: {name} is {here[name]} here and was {there[name]}"
        for name in sorted({*there["options"], *here["options"]}):
            old, new = there["options"].get(name), here["options"].get(name)
            if old != new:
                yield f"{role}: {name} is {_shown(new)} here and was {_shown(old)}"


def _gpus(document: Document, gpus: frozenset[str] | None) -> Iterator[str]:
    measured = {gpu.name for gpu in document.gpus}
    if gpus is not None and measured and not gpus <= measured:
        yield f"GPUs are {', '.join(sorted(gpus))} here and were {', '.join(sorted(measured))}"


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value) if isinstance(value, (dict, list)) else str(value)
