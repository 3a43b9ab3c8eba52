"""The `x-request-id` in log lines: what is accepted, and how far it reaches."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator

import pytest

from dynamo_local.system.request_log import (
    FORMAT,
    MAX_LENGTH,
    OncePerSecond,
    RequestIdFilter,
    accept_or_make,
    bound,
    unbound,
    x_request_id,
)
from dynamo_local.transport.requests.frames import WIRE_VERSION, decode_header, encode_value


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """A logger's output in the format of worker processes."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(OncePerSecond(FORMAT))
    handler.addFilter(RequestIdFilter())
    logger = logging.getLogger("test_request_log")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield written
    logger.removeHandler(handler)


@pytest.mark.parametrize("given", ["abc", "a/b:c=d%20e", "x" * MAX_LENGTH])
def test_a_clients_id_is_kept(given: str) -> None:
    assert accept_or_make(given) == given


@pytest.mark.parametrize(
    "bad", ["", "a b", "x" * (MAX_LENGTH + 1), "a\nERROR forged: line", "a\r", "a\x1b[31m", "a\x00", "\u00fcber", "a\n"]
)
def test_an_id_that_could_forge_or_flood_a_log_is_replaced(bad: str) -> None:
    """A client must not write lines of its own into our logs; nor may another process that speaks our wire format."""
    made = accept_or_make(bad)
    assert made != bad
    assert accept_or_make(made) == made
    with bound(bad):
        assert x_request_id() == ""


async def test_lines_within_a_request_carry_its_id(lines: io.StringIO) -> None:
    log = logging.getLogger("test_request_log")

    async def below(text: str) -> None:
        await asyncio.sleep(0)
        log.info("%s", text)

    async def request(name: str) -> None:
        with bound(name):
            await asyncio.create_task(below(f"of {name}"))
            with unbound():
                outliving = asyncio.create_task(below("of none"))
            await outliving

    await asyncio.gather(request("one"), request("two"))
    log.info("outside")
    texts = [line.partition(" test_request_log: ")[2] for line in lines.getvalue().splitlines()]
    assert sorted(texts) == ["[one] of one", "[two] of two", "of none", "of none", "outside"]


def test_dates_are_those_of_the_library() -> None:
    ours, theirs = OncePerSecond(FORMAT), logging.Formatter(FORMAT)
    for created_s in (0.0, 1_795_000_000.25, 1_795_000_000.9996, 1_795_000_001.0, 1_795_000_000.5):
        record = logging.makeLogRecord({"created": created_s, "msecs": int(created_s % 1 * 1000)})
        assert ours.formatTime(record) == theirs.formatTime(record)


def test_a_request_of_an_older_worker_is_understood() -> None:
    old = encode_value([WIRE_VERSION, "r-1", None, "127.0.0.1", 4711, b"t" * 16, b"\xc0"])
    assert decode_header(old).x_request_id == ""
