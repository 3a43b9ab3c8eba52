"""Figures of `dynamo bench`, and the command lines of other tools."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dynamo_local.cli.bench import Bench, command_of, figures_of_vllm
from dynamo_local.cli.main import cli
from dynamo_local.measuring.bench import NoAnswer, Sent, arrivals, figures, table
from tests.tools.answers import checked

ASKED = Bench("http://127.0.0.1:8000", "m", "/models/m", "a-secret", 10, None, 4, 1024, 128, 0)


def test_figures_are_those_of_vllm_bench_serve() -> None:
    sent = [
        Sent(100, 0.0, 1.0, (0.1, 0.2, 0.4), 5),
        Sent(100, 0.5, 2.0, (0.8,), 1),
        Sent(100, 1.0, 1.5, error="HTTP 503: full"),
    ]
    found = figures(sent)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["HTTP 503: full"])
    assert (found["request_throughput"], found["output_throughput"]) == (1.0, 3.0)
    assert found["mean_ttft_ms"] == pytest.approx(200.0)
    assert found["p99_ttft_ms"] == pytest.approx(298.0)
    assert found["median_tpot_ms"] == pytest.approx(75.0), "four tokens after the first, in 0.3 s"
    assert found["mean_itl_ms"] == pytest.approx(150.0)
    assert "Mean TTFT (ms):                          200.00" in table(found)
    checked("bench", {"tool": "own", "url": "u", "model": "m", **found})


def test_without_an_answer_there_are_no_figures() -> None:
    with pytest.raises(NoAnswer, match="none of 1 requests was answered; the first: HTTP 401"):
        figures([Sent(1, 0.0, 1.0, error="HTTP 401")])


def test_arrivals_keep_the_rate() -> None:
    made = arrivals(2000, 10.0, 7, 9, seed=1)
    assert made[-1].at_s == pytest.approx(200.0, rel=0.1)
    assert {each.at_s for each in arrivals(3, float("inf"), 7, 9, seed=1)} == {0.0}


@pytest.mark.parametrize("tool", ["vllm", "aiperf"])
def test_no_key_is_on_a_command_line(tool: str) -> None:
    words = command_of(tool, ASKED, ["--more", "1"])
    assert ASKED.key not in " ".join(words)
    assert words[-2:] == ["--more", "1"]
    assert ASKED.url in words


@pytest.mark.parametrize("tool", ["vllm", "aiperf"])
def test_a_tool_is_told_where_the_tokenizer_is_unless_its_own_words_say_so(tool: str) -> None:
    words = command_of(tool, ASKED, [])
    assert words[words.index("--tokenizer") + 1] == ASKED.tokenizer
    assert command_of(tool, ASKED, ["--tokenizer", "/t"]).count("--tokenizer") == 1


def test_a_stray_word_is_no_word_of_a_tool() -> None:
    result = CliRunner().invoke(cli, ["bench", "mine", "--with", "vllm"])
    assert result.exit_code != 0
    assert "a namespace is -n mine" in str(result.exception)


def test_the_result_of_vllm_has_our_keys() -> None:
    found = figures_of_vllm({"completed": 9, "duration": 1.0, "mean_ttft_ms": 3.0}, ASKED)
    assert (found["completed"], found["failed"], found["mean_ttft_ms"], found["mean_itl_ms"]) == (9, 1, 3.0, None)
