"""`dynamo planner profile show`: table, JSON, page, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_OK
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.arbiter.scripted_arbiter import dynamo
from tests.fakes.profile_folders import decode_arrays, prefill_arrays, write_json, write_npz

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = dynamo(monkeypatch, "planner", "profile", "show", *words)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_the_table_has_each_point_and_the_most_within_a_target(show: Command) -> None:
    """Measured beside what is taken; where the curve is not the points, a note."""
    code, out, _ = show(DEFAULT_PROFILE, "--itl", "10", "--isl", "3000", "--osl", "300")
    assert code == EXIT_OK
    lines = [line.split() for line in out.splitlines()]
    assert ["6202", "123.24", "123.24", "50,326", "50,326"] in lines
    assert any(line[:2] == ["3000", "–"] for line in lines)
    assert any(line[:2] == ["3150", "10"] and line[2] == "4,605" for line in lines)
    assert "note: ITL falls at context 350 as the load rises, from 46.65 to 40.96 ms" in out


def test_json_has_the_same_and_says_what_is_extrapolated(show: Command) -> None:
    code, out, _ = show(DEFAULT_PROFILE, "--json", "--isl", "50000", "--itl", "1")
    assert code == EXIT_OK
    told = json.loads(out, parse_constant=lambda text: pytest.fail(text))
    assert [row["isl"] for row in told["prefill"] if row["extrapolated"]] == [50_000]
    assert len(told["decode"]) == 41
    assert {row["attainable"] for row in told["best"]} == {False}
    assert told["measured"]["isl"] == [100, 16372]


def test_a_context_with_one_point_is_told_and_left_out(show: Command, tmp_path: Path) -> None:
    decode = decode_arrays()
    added = {"x_kv_usage": 0.9, "y_context_length": 90_000.0, "z_itl": 14.01, "z_thpt_per_gpu": 36.0}
    code, out, _ = show(write_npz(tmp_path, decode=decode | {k: [*decode[k], v] for k, v in added.items()}))
    assert code == EXIT_OK
    assert "note: context 90000 has one point only, and is left out" in out


@pytest.mark.full
def test_the_page_is_self_contained_and_the_same_every_time(show: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pages = []
    for name in ("one.html", "two.html"):
        code, out, _ = show(DEFAULT_PROFILE, "--report", str(tmp_path / name))
        assert code == EXIT_OK
        assert f"report: {tmp_path / name}" in out
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    assert len(pages[0]) < 1_000_000
    assert pages[0].count("<svg") == 1
    for absent in ("<script", 'src="http', "<link", "not attainable</td><td>"):
        assert absent not in pages[0]
    for there in (DEFAULT_PROFILE, "ITL falls at context 350", "extrapolated", "4,833"):
        assert there in pages[0]


def test_a_page_that_cannot_be_written_is_refused(show: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, error = show(DEFAULT_PROFILE, "--report", str(tmp_path / "nowhere" / "page.html"))
    assert code == EXIT_BAD_INPUT
    assert "nowhere" in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("b200",), "no engine profile 'b200'"),
        ((DEFAULT_PROFILE, "--osl", "300"), "give both"),
        ((DEFAULT_PROFILE, "--itl", "0"), "--itl"),
        ((DEFAULT_PROFILE, "--isl", "nan"), "--isl"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: tuple[str, ...], told: str, show: Command) -> None:
    code, _, error = show(*words)
    assert code == EXIT_BAD_INPUT
    assert told in error


def test_a_profile_that_a_planner_cannot_size_by_is_refused(show: Command, tmp_path: Path) -> None:
    prefill = prefill_arrays()
    del prefill["prefill_thpt_per_gpu"]
    code, _, error = show(write_json(tmp_path, prefill))
    assert code == EXIT_BAD_INPUT
    assert "prefill_thpt_per_gpu" in error
