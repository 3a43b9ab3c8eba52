"""The streams of `dynamo bench`, read from a server with a known pace."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dynamo_local.cli.bench import Bench, sent_load
from dynamo_local.measuring.bench import Load, Sent, arrivals, figures
from tests.drivers.paced_completions import PACE_S, TOKENS


def _sent(port: int, streams: int) -> list[Sent]:
    asked = Bench(f"http://127.0.0.1:{port}", "m", "m", None, streams, None, None, 8, TOKENS, 0)
    return sent_load(asked, Load(arrivals(streams, math.inf, 8, TOKENS, 0)))


@pytest.fixture(scope="module")
def paced() -> Iterator[int]:
    """Its port."""
    words = [sys.executable, "-m", "tests.drivers.paced_completions"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.alone
@pytest.mark.timing
@pytest.mark.parametrize("streams", [2, 30])
def test_the_median_gap_is_the_servers_pace_however_many_stream(paced: int, streams: int) -> None:
    found = figures(_sent(paced, streams))
    assert (found["completed"], found["total_output_tokens"]) == (streams, streams * TOKENS)
    assert found["median_itl_ms"] == pytest.approx(PACE_S * 1000, rel=0.4)
    assert found["mean_tpot_ms"] == pytest.approx(PACE_S * 1000, rel=0.4)


def test_a_server_that_is_not_there_is_a_failed_request() -> None:
    assert "ConnectionRefusedError" in str(_sent(1, 1)[0].error)
