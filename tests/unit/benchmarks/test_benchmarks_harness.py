"""The harness: figures, targets, verdicts, exit codes and what is printed."""

from __future__ import annotations

import importlib
import json

import pytest

from benchmarks import __main__ as program
from benchmarks.harness import (
    GROSS_FACTOR,
    Figure,
    Outcome,
    Report,
    at_least,
    at_most,
    execute,
    machine,
    machine_line,
    number,
    percentile,
    table,
)


def outcome_of(*figures: Figure) -> Outcome:
    """A benchmark that ran and found these."""
    return Outcome("example", 1.0, 0.5, Report("example", list(figures)))


def test_a_figure_shows_minimum_median_and_maximum() -> None:
    shown = Figure("commit", "ms", (3.0, 1.0, 2.0), at_most(5.0)).to_dict()
    assert (shown["min"], shown["median"], shown["max"], shown["samples"]) == (1.0, 2.0, 3.0, [3.0, 1.0, 2.0])
    assert (shown["target"], shown["verdict"]) == ({"at_most": 5.0}, "met")


def test_a_figure_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="'commit' has no sample"):
        Figure("commit", "ms", ())


@pytest.mark.parametrize(
    ("target", "median", "verdict"),
    [
        (at_most(5.0), 5.0, "met"),
        (at_most(5.0), 5.1, "missed"),
        (at_most(5.0), 5.0 * GROSS_FACTOR, "missed"),
        (at_most(5.0), 5.0 * GROSS_FACTOR + 0.1, "gross"),
        (at_least(5000.0), 5000.0, "met"),
        (at_least(5000.0), 4999.0, "missed"),
        (at_least(5000.0), 5000.0 / GROSS_FACTOR, "missed"),
        (at_least(5000.0), 1.0, "gross"),
        (at_least(5000.0), 0.0, "gross"),
    ],
)
def test_the_median_is_held_against_the_target(target: object, median: float, verdict: str) -> None:
    assert Figure("x", "", (median,), target).verdict == verdict  # type: ignore[arg-type]


def test_a_figure_without_a_target_has_no_verdict() -> None:
    assert Figure("x", "", (1.0,)).verdict is None


def test_one_slow_sample_does_not_miss_a_target() -> None:
    assert Figure("x", "ms", (1.0, 1.0, 900.0), at_most(5.0)).verdict == "met"


def test_a_missed_target_fails_nothing_and_a_gross_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    missed = outcome_of(Figure("x", "ms", (6.0,), at_most(5.0)))
    gross = outcome_of(Figure("x", "ms", (60.0,), at_most(5.0)))
    assert (program.verdict([missed]), program.verdict([missed, gross])) == (0, 1)
    assert "example failed: a figure is off its target by more than 4 times" in capsys.readouterr().err


def test_a_benchmark_that_cannot_run_is_an_outcome() -> None:

    def broken(short: bool) -> Report:
        raise RuntimeError("line 0\n" * 50 + "no etcd found")

    outcome = execute("broken", broken, short=True)
    assert outcome.failed
    assert outcome.error is not None
    assert outcome.error.startswith("RuntimeError: ")
    assert outcome.error.endswith("no etcd found")
    assert outcome.error.count("\n") < 10
    assert "could not run: RuntimeError" in table(outcome)


def test_the_table_has_targets_and_verdicts() -> None:
    report = Report("example")
    report.add("fast", "ms", [1.0, 2.0, 3.0], at_most(5.0))
    report.add("slow", "1/s", [1234.0], at_least(5000.0))
    report.notes.append("two cores")
    lines = table(Outcome("example", 2.5, 0.5, report)).splitlines()
    assert lines[0] == "example  (2.5 s, load before 0.5)"
    assert lines[2].split() == ["fast", "1.00", "2.00", "3.00", "ms", "≤", "5.00", "met"]
    assert lines[3].split()[:5] == ["slow", "1,234", "1,234", "1,234", "1/s"]
    assert lines[3].endswith("≥ 5,000  MISSED by more than 4 times")
    assert lines[4] == "  * two cores"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.0123, "0.012"), (1.5, "1.50"), (99.99, "99.99"), (1234567.8, "1,234,568")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(n) for n in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_machine_is_described() -> None:
    facts = machine()
    assert facts["cores_usable"] >= 1
    assert facts["packages"]["circus"].startswith("0.19")
    assert f"Python {facts['python']}" in machine_line(facts)


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        program.main(["frontendd"])
    assert left.value.code == 2
    assert "no benchmark 'frontendd'; there are: first_token, frontend" in capsys.readouterr().err


@pytest.mark.parametrize("name", program.NAMES)
def test_every_benchmark_has_a_run(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").run)


def test_json_is_one_object_with_machine_and_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def benchmark(short: bool) -> Report:
        asked.append(short)
        return Report("statefile", [Figure("commit", "ms", (1.0,), at_most(5.0))])

    monkeypatch.setattr(program, "load", lambda name: benchmark)
    assert program.main(["--short", "--json", "statefile"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (asked, said["short"], [report["name"] for report in said["reports"]]) == ([True], True, ["statefile"])
    assert said["reports"][0]["figures"][0]["verdict"] == "met"
    assert "python" in said["machine"]
