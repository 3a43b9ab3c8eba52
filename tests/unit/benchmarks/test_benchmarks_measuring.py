"""How the benchmarks turn what they saw into figures: token times, stream parsing, CPU clocks, ports."""

from __future__ import annotations

import asyncio
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

from benchmarks import deployment, frontend, load, processes, statefile
from benchmarks.data_plane import latencies


def events(*texts: str) -> bytes:
    """A chat's stream as the Frontend writes it, from the role to `[DONE]`."""
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
    """A stream that has read these blocks."""
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
