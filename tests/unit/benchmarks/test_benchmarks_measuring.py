"""How the benchmarks turn what they saw into figures: token times, stream parsing, CPU clocks, ports."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import deployment, frontend, load, processes, statefile
from benchmarks.actuators.facts import Facts, Kept, OfEngine
from benchmarks.actuators.page import COMMAND, PAGE, p99, report, section, write
from benchmarks.data_plane import latencies
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
from benchmarks.measured_pages import END, wrapped
from dynamo_local.core.lead_times import Rung


def events(*texts: str) -> bytes:
    parts = [b'data: {"id":"chatcmpl-0a1b-9f3c","choices":[{"delta":{"role":"assistant","content":""}}]}\n\n']
    parts += [
        b'data: {"id":"chatcmpl-0a1b-9f3c","choices":[{"delta":{"content":"%s"}}]}\n\n' % t.encode() for t in texts
    ]
    return b"".join([*parts, b"data: [DONE]\n\n"])


class Sent:
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True


async def feed(*blocks: bytes) -> tuple[load.Stream, Sent, asyncio.Future[None]]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream, transport = load.Stream(b"request", done), Sent()
    stream.connection_made(transport)  # type: ignore[arg-type]
    for block in blocks:
        stream.data_received(block)
    return stream, transport, done


async def test_a_stream_counts_characters_however_they_were_put_together() -> None:
    stream, transport, done = await feed(events("a", "aaa"))
    await done
    assert (transport.data, transport.closed, stream.id, stream.tokens) == (b"request", True, "0a1b-9f3c", 4)


async def test_a_stream_that_is_cut_anywhere_counts_the_same() -> None:
    whole = events("a", "aa", "a")
    for at in range(1, len(whole)):
        stream, _, done = await feed(whole[:at], whole[at:])
        await done
        assert stream.tokens == 4


async def test_a_stream_without_its_end_is_an_error() -> None:
    stream, _, done = await feed(events("a").removesuffix(b"data: [DONE]\n\n"))
    stream.connection_lost(None)
    with pytest.raises(RuntimeError, match="broke after 1 tokens"):
        await done


def test_yield_times_give_each_token_of_an_output_its_time() -> None:
    assert frontend.yield_times(array("d", [1.0, 1, 2.0, 0, 3.0, 2]).tobytes()) == [1.0, 3.0, 3.0]


def test_a_tokens_way_is_from_its_yield_to_its_read() -> None:
    assert frontend.ways([1.0, 2.0, 3.0], [(1.5, 1), (4.0, 3)]) == [0.5, 2.0, 1.0]


def test_other_tokens_than_were_made_are_an_error() -> None:
    """Lost or doubled text would make every figure wrong."""
    with pytest.raises(ValueError, match="shorter"):
        frontend.ways([1.0, 2.0], [(3.0, 1)])


def test_a_rate_is_between_the_first_and_the_last_point() -> None:
    assert frontend.rate([(1.0, 5), (2.0, 7), (3.0, 15)]) == 5.0


def test_two_cores_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    with frontend.two_cores() as chosen:
        assert os.sched_getaffinity(0) == set(chosen)
        assert len(chosen) == min(2, len(before))
    assert os.sched_getaffinity(0) == before


def test_the_remote_prefill_configuration_sends_every_prompt_away() -> None:
    sections = frontend.config(frontend.FAST, {}, prefill=True)
    assert sections["VllmWorker"]["remote-prefill"] is True
    assert sections["PrefillWorker"]["sim"] == sections["VllmWorker"]["sim"]
    assert "PrefillWorker" not in frontend.config(frontend.FAST, {})


def test_the_cpu_clock_of_another_process_is_finer_than_a_tick() -> None:
    program = "import sys, time\nwhile time.process_time() < 0.1: pass\nprint(time.process_time(), flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        own_s = float(child.stdout.readline())
        used_s = processes.cpu_s(child.pid)
        child.communicate(b"\n")
    assert own_s <= used_s < own_s + 0.1


def test_the_cpu_clock_of_nobody_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    with pytest.raises(ProcessLookupError, match=f"no process {child.pid}"):
        processes.cpu_s(child.pid)


def test_a_deployment_sees_nothing_of_the_callers_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:2379")
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", "/somewhere")
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", "{}")
    with deployment.folders() as place:
        env = place.env
        assert place.root.stat().st_mode & 0o077 == 0
    assert not {"ETCD_ENDPOINTS", "DYN_LOCAL_STATE_DIR", "DYNAMO_SERVICE_CONFIG"} & set(env)
    assert env["XDG_RUNTIME_DIR"].startswith(str(place.root))
    assert not place.root.exists()


@pytest.fixture
def answering() -> Iterator[list[bytes]]:
    """A server on loopback that answers one connection with the blocks put into the list; its port comes first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        blocks: list[bytes] = [str(server.getsockname()[1]).encode()]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                for block in blocks[1:]:
                    connection.sendall(block)

        thread = threading.Thread(target=serve)
        thread.start()
        yield blocks
        thread.join(5.0)


def test_the_first_token_is_the_first_with_text(answering: list[bytes]) -> None:
    role, rest = events("a").split(b"\n\n", 1)
    answering += [role + b"\n\n", rest]
    before_s = time.perf_counter()
    assert before_s < deployment.first_token(int(answering[0]), "sim-tiny") <= time.perf_counter()


def test_a_stream_without_text_has_no_first_token(answering: list[bytes]) -> None:
    answering.append(b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": "no worker"}')
    with pytest.raises(RuntimeError, match=r"without a token.*no worker"):
        deployment.first_token(int(answering[0]), "sim-tiny")


def test_latencies_are_in_milliseconds() -> None:
    assert latencies("request", [0.001, 0.002, 0.003]) == {"request p50": 2.0, "request p99": 3.0}


def test_statefile_rounds_alternate_and_the_warm_up_is_not_counted(tmp_path: Path) -> None:
    commits_ms, writes_ms, size_bytes = statefile.measure(8, 3, tmp_path)
    assert len(commits_ms) == len(writes_ms) == 3
    assert size_bytes == (tmp_path / "bare8.json").stat().st_size


# --- benchmarks harness
# The harness: figures, targets, verdicts, exit codes and what is printed.


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


# --- benchmarks actuators
# The page of the ways to one more worker, from what a run has kept.

MACHINE = {
    "date": "2026-11-23T10:00:00+00:00",
    "cpu": "a processor",
    "cores_usable": 2,
    "cores": 2,
    "memory_gib": 8.0,
    "load_average": [0.1, 0.2, 0.3],
    "kernel": "6.1",
    "python": "3.11",
}


@pytest.fixture
def facts() -> Facts:
    starts = [{"imports": 2.0, "engine": 1.0}, {"imports": 4.0, "engine": 1.0}]
    of = OfEngine(
        {Rung.FLIP_TO_DECODE: [0.1, 0.2, 0.9], Rung.SPARE: [1.0], Rung.COLD: [3.0, 5.0]},
        {Rung.FLIP_TO_DECODE: [], Rung.SPARE: [{"engine": 0.9}], Rung.COLD: starts},
    )
    return Facts(MACHINE, (0.2, 1.4), {"sim": of}, ["vLLM was not installed there."])


def test_what_was_kept_is_shown_again(facts: Facts, tmp_path: Path) -> None:
    """The lead measures on one machine, and writes the page from the file."""
    Kept(facts).save(tmp_path / "facts.json")
    assert Kept.load(tmp_path / "facts.json").facts == facts


def test_the_page_has_each_way_its_share_of_a_cold_start_and_the_stages(facts: Facts) -> None:
    """No figure is an estimate: what was not measured is not in it."""
    text = section(facts)
    assert "2 of 2 cores" in text
    assert "load 0.2 before, 1.4 after" in text
    assert "| flip to decode (3) | 0.20 s | 0.90 s | 0.90 s | 1/20 |" in text
    assert "| cold start (2) | 4.00 s | 5.00 s | 5.00 s |  |" in text
    assert "| imports | 3.00 s | – |" in text
    assert "| **all** | **4.00 s** | **0.90 s** |" in text
    assert text.endswith("vLLM was not installed there.")


def test_flips_are_judged_by_the_slowest_of_a_hundred(facts: Facts) -> None:
    verdicts = {figure.name: figure.verdict for figure in report(facts).figures if figure.target}
    assert verdicts == {
        "sim, flip_to_decode: p99 of 3": "missed",
        "sim, flip_to_decode: of a cold start": "met",
        "sim, spare: of a cold start": "met",
    }
    assert p99([float(n) for n in range(1, 201)]) == 198.0


def test_the_page_has_a_place_for_it(facts: Facts, tmp_path: Path) -> None:
    page = tmp_path / "actuators.md"
    page.write_text(PAGE.read_text())
    write(page, facts)
    before, after = PAGE.read_text(), page.read_text()
    begin = f"<!-- measured: {COMMAND} -->"
    assert after.partition(begin)[0] == before.partition(begin)[0]
    assert after.partition(END)[2] == before.partition(END)[2]
    assert wrapped(section(facts)) in after
