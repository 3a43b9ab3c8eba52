"""Profiles as Dynamo's profiler writes them, and everything that can be wrong with one."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_local.errors import ConfigError
from dynamo_local.profile.interpolation import interpolators
from dynamo_local.profile.reading import read_profile, shipped_profiles
from tests.fakes.profile_folders import decode_arrays, prefill_arrays, write_json, write_npz


@pytest.mark.parametrize("profile", shipped_profiles())
def test_both_profiles_that_ship_are_read_whole(profile: str) -> None:
    read = read_profile(profile)
    assert read.name == profile
    assert len(read.prefill.isl) == len(read.prefill.ttft_ms) == len(read.prefill.thpt_per_gpu) >= 11
    decode = read.decode
    assert len(decode.kv_usage) == len(decode.itl_ms) == len(decode.thpt_per_gpu) >= 41


def test_json_says_the_same_as_npz(tmp_path: Path) -> None:
    arrays = read_profile(write_npz(tmp_path / "npz"))
    for name, decode in (("scalar", None), ("array", decode_arrays())):
        plain = read_profile(write_json(tmp_path / name, decode=decode))
        assert (plain.prefill, plain.decode) == (arrays.prefill, arrays.decode)


def test_npz_is_taken_where_both_are_there_and_each_part_by_itself(tmp_path: Path) -> None:
    """As Dynamo does: prefill from one, decode from the other."""
    write_npz(tmp_path)
    (tmp_path / "prefill_raw_data.json").write_text("nothing")
    assert [path.suffix for path in read_profile(str(tmp_path)).files] == [".npz", ".npz"]
    (tmp_path / "selected_prefill_interpolation" / "raw_data.npz").unlink()
    write_json(tmp_path)
    assert [path.name for path in read_profile(str(tmp_path)).files] == ["prefill_raw_data.json", "raw_data.npz"]


def test_order_does_not_matter_and_a_point_measured_twice_counts_once(tmp_path: Path) -> None:
    """With the mean of what was measured."""
    made = prefill_arrays()
    turned = {name: [values[1], *values[::-1]] for name, values in made.items()}
    turned["prefill_ttft"][0] += 2.0
    read = read_profile(write_npz(tmp_path, turned)).prefill
    assert read.isl == tuple(made["prefill_isl"])
    assert read.ttft_ms[1] == pytest.approx(made["prefill_ttft"][1] + 1.0)


def test_an_engine_needs_no_throughput_but_a_planner_does(tmp_path: Path) -> None:
    prefill, decode = prefill_arrays(), decode_arrays()
    del prefill["prefill_thpt_per_gpu"]
    profile = write_npz(tmp_path, prefill, decode)
    assert read_profile(profile).prefill.thpt_per_gpu == ()
    with pytest.raises(ConfigError, match=r"has no array prefill_thpt_per_gpu: a planner"):
        interpolators(profile)


def changed(arrays: dict[str, Any], **values: Any) -> dict[str, Any]:
    return arrays | values


PREFILL, DECODE = prefill_arrays(), decode_arrays()


@pytest.mark.parametrize("write", [write_npz, write_json])
@pytest.mark.parametrize(
    ("prefill", "decode", "told"),
    [
        (
            {k: v for k, v in PREFILL.items() if k != "prefill_ttft"},
            None,
            "no array prefill_ttft; the file has: prefill_isl",
        ),
        (changed(PREFILL, prefill_ttft=[1.0, 2.0]), None, "prefill_ttft has 2 values and prefill_isl 4"),
        (changed(PREFILL, prefill_isl=[[100.0, 200.0]] * 2), None, "prefill_isl is no list of numbers"),
        (changed(PREFILL, prefill_isl=[]), None, "prefill_isl is empty"),
        (changed(PREFILL, prefill_isl=[100.0, -5.0, 300.0, 400.0]), None, r"prefill_isl\[1\] is -5"),
        (changed(PREFILL, prefill_ttft=[12.0, float("nan"), 90.0, 170.0]), None, r"prefill_ttft\[1\] is nan"),
        (changed(PREFILL, prefill_ttft=[12.0, 30.0, 90.0, float("inf")]), None, r"prefill_ttft\[3\] is inf"),
        ({k: v[:2] for k, v in PREFILL.items()}, None, "2 different lengths; 3 or more"),
        (changed(PREFILL, prefill_ttft=[0.012, 0.03, 0.09, 0.17]), None, "prefill_thpt_per_gpu is .* milliseconds"),
        (None, {k: v for k, v in DECODE.items() if k != "max_kv_tokens"}, "no array max_kv_tokens"),
        (None, changed(DECODE, max_kv_tokens=[1, 2]), "max_kv_tokens has 2 values, but must be one number"),
        (None, changed(DECODE, max_kv_tokens=[0]), "max_kv_tokens"),
        (None, changed(DECODE, x_kv_usage=[100 * u for u in DECODE["x_kv_usage"]]), "but must be a fraction"),
        (None, changed(DECODE, z_itl=[ms / 1000 for ms in DECODE["z_itl"]]), "z_thpt_per_gpu is .* milliseconds"),
        (None, changed(DECODE, y_context_length=[500.0] * len(DECODE["z_itl"])), "two context lengths or more"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(
    write: Any, prefill: dict[str, Any] | None, decode: dict[str, Any] | None, told: str, tmp_path: Path
) -> None:
    profile = write(tmp_path, prefill, decode)
    with pytest.raises(ConfigError, match=told) as caught:
        read_profile(profile)
    kind = "prefill" if prefill else "decode"
    assert f"{kind}_" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def bomb() -> bytes:
    """An array that says it is huge, in few bytes."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("prefill_isl.npy", npy)
    return packed.getvalue()


def pickled() -> bytes:
    """Objects, which only unpickling would read."""
    packed = io.BytesIO()
    np.savez(packed, prefill_isl=np.array([{"a": 1}], dtype=object))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read"),
        (b"no zip at all", "no NPZ file"),
        (bomb(), "at most 100,000 are read"),
        (pickled(), "holds no numbers"),
    ],
)
def test_a_file_that_is_none_costs_nothing(content: bytes, told: str, tmp_path: Path) -> None:
    profile = write_npz(tmp_path)
    (tmp_path / "selected_prefill_interpolation" / "raw_data.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_profile(profile)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "cannot be read"),
        ("[1, 2]", "no JSON object"),
        ("[" * 100_000, "cannot be read"),
        (json.dumps({"prefill_isl": "100"}), "no list of numbers"),
        (json.dumps({"prefill_isl": [True, False]}), "no list of numbers"),
        ('{"prefill_isl": [1' + "0" * 400 + "]}", r"prefill_isl\[0\]"),
    ],
)
def test_json_that_is_no_profile_is_refused(text: str, told: str, tmp_path: Path) -> None:
    profile = write_json(tmp_path)
    (tmp_path / "prefill_raw_data.json").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_profile(profile)


def test_half_a_profile_says_which_half_is_missing(tmp_path: Path) -> None:
    write_npz(tmp_path)
    (tmp_path / "selected_prefill_interpolation" / "raw_data.npz").unlink()
    with pytest.raises(ConfigError, match=r"neither .*raw_data\.npz nor prefill_raw_data\.json"):
        read_profile(str(tmp_path))
