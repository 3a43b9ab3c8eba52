"""Reads profiles as NVIDIA Dynamo's profiler writes them, NPZ or JSON, and checks them.

    DIR/selected_prefill_interpolation/raw_data.npz    else DIR/prefill_raw_data.json
        prefill_isl[n] tokens, prefill_ttft[n] ms, prefill_thpt_per_gpu[n] prompt tokens/s/GPU
    DIR/selected_decode_interpolation/raw_data.npz     else DIR/decode_raw_data.json
        x_kv_usage[m] 0..1, y_context_length[m] tokens, z_itl[m] ms, z_thpt_per_gpu[m] tokens/s/GPU,
        max_kv_tokens[1] (in JSON also a plain number)

An engine needs times only; the throughputs are a planner's, which counts GPUs by them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dynamo_local.errors import ConfigError

PROFILES = Path(__file__).parent / "data"

DEFAULT_PROFILE = "dynamo_H200_TP1P_TP1D"
"""Measured: Llama-3.1-8B-Instruct-FP8 on an H200 (`data/README.md`)."""

SHIPPED_GPUS = {DEFAULT_PROFILE: ("H200", 141e9), "Qwen3-8B_h100_sxm_vllm_tp1": ("H100", 80e9)}
"""GPU and memory of the shipped profiles."""

BYTES_MAX = 16 << 20
"""Bound on one file, and on its declared arrays. A sweep has a few kB."""

PROFILE_DOCUMENT = "profile.json"
"""Beside Dynamo's files in a folder that `dynamo profile` wrote (`profile.document`)."""

POINTS_MAX = 100_000
VALUE_MIN, VALUE_MAX = 1e-9, 1e12
"""Bound on a length, time or throughput. A larger one is no measurement, and may overflow."""

PREFILL_POINTS_MIN = 3
USAGE_MAX = 1.05
"""A sweep rounds the mean context length; far above 1, usage is written in per cent."""

_THROUGHPUT_SHARE = (1 / 256, 2.0)
"""Lowest plausible ratio of measured throughput per GPU to the throughput that latency implies for one engine. Several
GPUs and waiting requests lower the ratio. A thousandth means a wrong unit."""


@dataclass(frozen=True, slots=True)
class PrefillPoints:
    """One prompt at a time: `isl` tokens (ascending), `ttft_ms`; `thpt_per_gpu` in tokens/s/GPU, empty where the
    profile has none."""

    isl: tuple[float, ...]
    ttft_ms: tuple[float, ...]
    thpt_per_gpu: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodePoints:
    """`kv_usage` (0..1 of `max_kv_tokens`) and mean `context_length` (tokens) of what runs, with `itl_ms`;
    `thpt_per_gpu` in tokens/s/GPU, empty where the profile has none."""

    max_kv_tokens: int
    kv_usage: tuple[float, ...]
    context_length: tuple[float, ...]
    itl_ms: tuple[float, ...]
    thpt_per_gpu: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """A checked profile. `name` is a shipped one's, else its folder; `files` are the two that were read."""

    name: str
    folder: Path
    files: tuple[Path, Path]
    prefill: PrefillPoints
    decode: DecodePoints


def shipped_profiles() -> tuple[str, ...]:
    """Names that can be given without a path, in order."""
    return tuple(sorted(path.name for path in PROFILES.iterdir() if path.is_dir()))


def nearest_shipped(gpu: str, memory_bytes: float | None) -> str:
    """The shipped profile to begin with on such a GPU: one of the same name, else of the nearest size of memory."""
    for name, (known, _) in SHIPPED_GPUS.items():
        if known in gpu.upper():
            return name
    if not memory_bytes:
        return DEFAULT_PROFILE
    return min(SHIPPED_GPUS, key=lambda name: abs(math.log(SHIPPED_GPUS[name][1] / memory_bytes)))


def profile_folder(profile: str) -> Path:
    """The folder of a shipped profile, or of a path. Raises `ConfigError` naming those that ship."""
    for folder in (PROFILES / profile, Path(profile).expanduser()):
        if profile and any(path.is_file() for path in _places(folder, "decode")):
            return folder
    raise ConfigError(
        f"there is no engine profile {profile!r}: give a folder that holds selected_decode_interpolation/raw_data.npz "
        f"or decode_raw_data.json, or one of: {', '.join(shipped_profiles())}"
    )


def _places(folder: Path, kind: str) -> tuple[Path, Path]:
    return folder / f"selected_{kind}_interpolation" / "raw_data.npz", folder / f"{kind}_raw_data.json"


def read_profile(profile: str) -> Profile:
    """From a profile's name or its folder. Raises `ConfigError` that names the file and the array."""
    folder = profile_folder(profile)
    files = (_file(folder, "prefill"), _file(folder, "decode"))
    name = folder.name if folder.parent == PROFILES else str(folder)
    return Profile(name, folder, files, _prefill(files[0]), _decode(files[1]))


def _file(folder: Path, kind: str) -> Path:
    for path in _places(folder, kind):
        if path.is_file():
            return path
    npz, plain = _places(folder, kind)
    raise ConfigError(f"the profile in {folder} cannot be used: there is neither {npz} nor {plain.name}")


def _prefill(path: Path) -> PrefillPoints:
    arrays = _Arrays(path)
    isl = arrays.positive("prefill_isl")
    ttft_ms = arrays.positive("prefill_ttft", like="prefill_isl")
    thpt = arrays.positive("prefill_thpt_per_gpu", like="prefill_isl", optional=True)
    rows = _means(zip(isl, ttft_ms, *([thpt] if thpt else []), strict=True), keys=1)
    if len(rows) < PREFILL_POINTS_MIN:
        raise arrays.wrong(f"prefill_isl has {len(rows)} different lengths; {PREFILL_POINTS_MIN} or more are needed")
    points = PrefillPoints(*_columns(rows))
    if points.thpt_per_gpu:
        alone = [isl / ttft_ms * 1000 for isl, ttft_ms in zip(points.isl, points.ttft_ms, strict=True)]
        arrays.check_units("prefill_thpt_per_gpu", points.thpt_per_gpu, alone, "prefill_isl / prefill_ttft")
    return points


def _decode(path: Path) -> DecodePoints:
    arrays = _Arrays(path)
    max_kv_tokens = arrays.number("max_kv_tokens")
    usage = arrays.positive("x_kv_usage", least=0.0)
    if max(usage) > USAGE_MAX:
        raise arrays.wrong(f"x_kv_usage holds {max(usage):g}, but must be a fraction of max_kv_tokens, 0..1")
    context = arrays.positive("y_context_length", like="x_kv_usage")
    itl_ms = arrays.positive("z_itl", like="x_kv_usage")
    thpt = arrays.positive("z_thpt_per_gpu", like="x_kv_usage", optional=True)
    rows = _means(zip(context, usage, itl_ms, *([thpt] if thpt else []), strict=True), keys=2)
    lines: dict[float, int] = {}
    for row in rows:
        lines[row[0]] = lines.get(row[0], 0) + 1
    if sum(count >= 2 for count in lines.values()) < 2:
        raise arrays.wrong(
            "two context lengths or more are needed (y_context_length), with two different x_kv_usage or more each, "
            f"but there are {', '.join(f'{count} at {context:g}' for context, count in sorted(lines.items()))}"
        )
    contexts, usages, itls, *rest = _columns(rows)
    points = DecodePoints(max_kv_tokens, usages, contexts, itls, *rest)
    if points.thpt_per_gpu:
        running = [u * max_kv_tokens / c for u, c in zip(usages, contexts, strict=True)]
        alone = [max(1.0, n) / itl * 1000 for n, itl in zip(running, itls, strict=True)]
        what = "x_kv_usage × max_kv_tokens / y_context_length / z_itl"
        arrays.check_units("z_thpt_per_gpu", points.thpt_per_gpu, alone, what)
    return points


def _means(rows: Any, keys: int) -> list[tuple[float, ...]]:
    """Sorted by the first columns; rows that agree there are one, with the means of the others."""
    found: dict[tuple[float, ...], list[tuple[float, ...]]] = {}
    for row in rows:
        found.setdefault(row[:keys], []).append(row[keys:])
    return [
        (*key, *(math.fsum(column) / len(column) for column in zip(*same, strict=True)))
        for key, same in sorted(found.items())
    ]


def _columns(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return list(zip(*rows, strict=True))


class _Arrays:
    """The arrays of one file. Every complaint names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._arrays = npz_arrays(path) if path.suffix == ".npz" else _json_arrays(path)
        except (OSError, ValueError, EOFError, KeyError, RecursionError) as error:
            raise self.wrong(f"it cannot be read: {error}") from error

    def wrong(self, what: str) -> ConfigError:
        """The error that says so."""
        return ConfigError(f"the profile {self._path} cannot be used: {what}")

    def positive(
        self, name: str, *, like: str | None = None, least: float = VALUE_MIN, optional: bool = False
    ) -> tuple[float, ...]:
        """Finite numbers above 0 (`least`: or 0), as many as `like` has."""
        if name not in self._arrays:
            if optional:
                return ()
            raise self.wrong(f"no array {name}; the file has: {', '.join(sorted(self._arrays)) or 'none'}")
        values = self._arrays[name]
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise self.wrong(f"{name} is no list of numbers")
        if not values:
            raise self.wrong(f"{name} is empty")
        if like is not None and len(values) != len(self._arrays[like]):
            others = len(self._arrays[like])
            raise self.wrong(f"{name} has {len(values)} values and {like} {others}; they belong together")
        for at, value in enumerate(values):
            if not least <= value <= VALUE_MAX:
                bound = "above 0" if least else "0 or more"
                raise self.wrong(f"{name}[{at}] is {value!s:.30}, but must be a finite number, {bound}")
        return tuple(float(value) for value in values)

    def number(self, name: str) -> int:
        """One whole number above 0: plain, or an array of one."""
        value = self._arrays.get(name)
        if isinstance(value, list) and len(value) != 1:
            raise self.wrong(f"{name} has {len(value)} values, but must be one number")
        if name in self._arrays and not isinstance(value, list):
            self._arrays[name] = [value]
        return max(1, round(self.positive(name)[0]))

    def check_units(self, name: str, found: Sequence[float], alone: Sequence[float], why: str) -> None:
        """Throughput and latency must tell of the same engine."""
        share = median(a / b for a, b in zip(found, alone, strict=True))
        low, high = _THROUGHPUT_SHARE
        if not low <= share <= high:
            raise self.wrong(
                f"{name} is {share:.3g} times what {why} gives; units are tokens, milliseconds and tokens/s per GPU"
            )


def _json_arrays(path: Path) -> dict[str, Any]:
    if path.stat().st_size > BYTES_MAX:
        raise ValueError(f"it is larger than {BYTES_MAX >> 20} MiB")
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    return found


def npz_arrays(path: Path) -> dict[str, Any]:
    """The arrays of numbers in a file, by name, as lists. Their headers are checked before anything is unpacked.

    Raises `ValueError`, `OSError` or `EOFError`.
    """
    # numpy is imported only where a profile is read: 0.1 s that `dynamo status` and others need not pay.
    import zipfile
    import zlib

    import numpy as np

    if path.stat().st_size > BYTES_MAX:
        raise ValueError(f"it is larger than {BYTES_MAX >> 20} MiB")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                with archive.open(member) as stream:
                    _check_header(member, stream)
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name].tolist() for name in data.files}
    # RuntimeError: encrypted, or packed in a way that this Python does not know.
    except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, RuntimeError) as error:
        raise ValueError(f"no NPZ file: {error}") from error


def _check_header(member: str, stream: Any) -> None:
    from numpy.lib import format as npy

    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.kind not in "iuf":
        raise ValueError(f"{member} holds no numbers, but {dtype}")
    if math.prod(shape) > POINTS_MAX:
        raise ValueError(f"{member} says that it holds {math.prod(shape):,} numbers; at most {POINTS_MAX:,} are read")


def lines_of(decode: DecodePoints, values: Sequence[float]) -> Mapping[float, list[tuple[float, float]]]:
    """`(KV tokens, value)` by context length, of contexts with two points or more: what `curves.surface` takes."""
    lines: dict[float, list[tuple[float, float]]] = {}
    for usage, context, value in zip(decode.kv_usage, decode.context_length, values, strict=True):
        lines.setdefault(context, []).append((usage * decode.max_kv_tokens, value))
    return {context: points for context, points in lines.items() if len(points) >= 2}
