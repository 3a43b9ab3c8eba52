"""Profiles as Dynamo's profiler writes them, and everything that can be wrong with one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_local.core.isotonic import isotonic
from dynamo_local.errors import ConfigError
from dynamo_local.profile.interpolation import FixedModel, Grid, Line, ProfileModel, interpolators, surface
from dynamo_local.profile.reading import DEFAULT_PROFILE, PROFILES, profile_folder, read_profile, shipped_profiles
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


# --- profile interpolation
# The performance models: profiles as they are measured, and what happens outside them.

QWEN = "Qwen3-8B_h100_sxm_vllm_tp1"


@pytest.fixture(scope="module")
def h200() -> ProfileModel:
    return ProfileModel.load(DEFAULT_PROFILE)


def test_a_prompt_alone_takes_the_profiles_ttft(h200: ProfileModel) -> None:
    """At every measured length, to the rounding of a sum."""
    data = np.load(PROFILES / DEFAULT_PROFILE / "selected_prefill_interpolation" / "raw_data.npz")
    for isl, ttft_ms in zip(data["prefill_isl"], data["prefill_ttft"], strict=True):
        assert (h200.launch_s + h200.prefill_s(0, int(isl))) * 1000 == pytest.approx(ttft_ms)


def test_chunks_of_a_prompt_add_up_to_the_whole(h200: ProfileModel) -> None:
    chunks = [h200.prefill_s(start, 2000) for start in range(0, 16_000, 2000)]
    assert sum(chunks) == pytest.approx(h200.prefill_s(0, 16_000))
    assert sum(chunks[4:]) > sum(chunks[:4])


def test_decode_takes_the_profiles_itl(h200: ProfileModel) -> None:
    grid = np.load(PROFILES / DEFAULT_PROFILE / "mocker_exact.npz")
    for i, j in ((0, 0), (10, 40), (50, 99), (99, 7)):
        kv, context = grid["decode_active_kv_tokens"][i], grid["decode_context_length"][j]
        assert h200.decode_s(1, kv, context) * 1000 == pytest.approx(grid["decode_itl"][i, j])


@pytest.mark.parametrize("profile", [DEFAULT_PROFILE, QWEN])
def test_more_work_never_takes_less_time(profile: str) -> None:
    model = ProfileModel.load(profile)
    prefill = [model.prefill_s(0, tokens) for tokens in range(0, 200_000, 997)]
    assert prefill == sorted(prefill)
    assert prefill[-1] > 5 * prefill[20]
    for context in (1, 350, 3000, 50_000):
        decode = [model.decode_s(1, kv, context) for kv in range(0, 2 * model.max_kv_tokens, 20_011)]
        assert decode == sorted(decode)
        assert decode[0] > 0
    assert model.launch_s > 0


def test_outside_the_profile_decode_is_the_value_at_its_edge(h200: ProfileModel) -> None:
    assert h200.decode_s(1, 500_000, 90_000) == h200.decode_s(1, 500_000, 14_000)
    assert h200.decode_s(1, 5_000_000, 3000) == h200.decode_s(1, h200.max_kv_tokens, 3000)


def test_scattered_points_give_nearly_the_exact_grid(tmp_path: Path, h200: ProfileModel) -> None:
    for part in ("selected_prefill_interpolation", "selected_decode_interpolation"):
        (tmp_path / part).mkdir()
        source = PROFILES / DEFAULT_PROFILE / part / "raw_data.npz"
        (tmp_path / part / "raw_data.npz").write_bytes(source.read_bytes())
    scattered = ProfileModel.load(str(tmp_path))
    assert scattered.max_kv_tokens == h200.max_kv_tokens == 945_029
    assert scattered.decode_s(1, 0.30761913 * 945_029, 2997) * 1000 == pytest.approx(15.47918428, rel=1e-6)
    for kv in range(50_000, 900_000, 50_000):
        for context in (3000, 6000, 9000, 12_000):
            assert scattered.decode_s(1, kv, context) == pytest.approx(h200.decode_s(1, kv, context), rel=0.10)


def test_a_profile_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=f"no engine profile 'b200'.*{DEFAULT_PROFILE}"):
        profile_folder("b200")


def test_a_broken_profile_is_refused_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "selected_decode_interpolation"
    folder.mkdir()
    (folder / "raw_data.npz").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        ProfileModel.load(str(tmp_path))
    np.savez(folder / "raw_data.npz", max_kv_tokens=[10])
    with pytest.raises(ConfigError, match="cannot be used"):
        ProfileModel.load(str(tmp_path))


def test_a_line_goes_on_with_the_slope_of_its_upper_half() -> None:
    """And is made non-decreasing: one dip in a measurement must not make more work cheaper."""
    line = Line([0, 10, 20, 30], [1, 2, 1.5, 4], extend_left=True)
    assert [line(x) for x in (0, 5, 10, 15, 20, 30)] == [1, 1.375, 1.75, 1.75, 1.75, 4]
    assert line(40) == pytest.approx(5.125)
    assert line(-10) == pytest.approx(0.25)
    assert Line([1, 2], [3, 4], extend_left=False)(0) == 3


def test_the_nearest_rising_values_keep_those_that_rise_already() -> None:
    rising = [0.1, 0.2, 0.2, 0.7]
    assert isotonic(rising) == rising
    assert isotonic([1, 5, 3, 1, 9]) == [1, 3, 3, 3, 9]
    assert isotonic([3, 2, 1]) == [2, 2, 2]
    assert isotonic([1, 5, 3, 9], [1, 3, 1, 1]) == [1, 4.5, 4.5, 9], "a square counts as much as its weight"


def test_a_surface_meets_its_points_and_is_linear_in_requests_between_contexts() -> None:
    """A pass of a + b·KV + c·requests comes back as it is, between the measured contexts too."""

    def itl_ms(kv: float, context: float) -> float:
        return 4 + 2e-5 * kv + 0.01 * kv / context

    lines = {c: [(kv, itl_ms(kv, c)) for kv in (0.0, 40_000.0, 90_000.0)] for c in (300.0, 3000.0)}
    found = surface(lines, 100_000)
    for context in lines:
        for kv in (0, 40_000, 65_000, 90_000):
            assert found(kv, context) == pytest.approx(itl_ms(kv, context))
    for context in (400, 1000, 2000):
        assert found(50_000, context) == pytest.approx(itl_ms(50_000, context), rel=0.01)
    assert found(50_000, 100) == found(50_000, 300)


def test_a_grid_is_bilinear_inside_and_flat_outside() -> None:
    grid = Grid([0, 2], [0, 4], [[0, 4], [2, 10]])
    assert grid(1, 2) == pytest.approx(4)
    assert grid(-5, -5) == 0
    assert grid(9, 9) == 10


def test_the_fixed_model_is_linear() -> None:
    model = FixedModel(prefill_ms_per_token=1, decode_ms=10, decode_ms_per_kv_token=0.5, launch_ms=3)
    assert (model.launch_s, model.prefill_s(7, 100), model.decode_s(2, 20, 10.0)) == (0.003, 0.1, 0.02)


def test_the_public_names_answer_a_planners_questions(h200: ProfileModel) -> None:
    assert DEFAULT_PROFILE in shipped_profiles()
    assert h200.ttft_s(2000) == h200.launch_s + h200.prefill_s(0, 2000)
    assert h200.itl_s(10_000, 500.0) == h200.decode_s(20, 10_000, 500.0)


def test_profiles_stand_alone() -> None:
    code = "import sys, dynamo_local.profile; print([m for m in sys.modules if m.startswith('dynamo_local.engines')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
