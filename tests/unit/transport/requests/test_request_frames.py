"""The wire format: frames, numbering, headers, errors."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local import errors
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
from dynamo_local.transport.requests.frames import (
    MAX_FRAME_BYTES,
    WIRE_VERSION,
    FrameDecoder,
    FrameKind,
    ItemSequence,
    RequestHeader,
    data_frame,
    decode_error,
    decode_header,
    decode_value,
    encode_error,
    encode_header,
    encode_value,
    frame,
)

HEADER = RequestHeader(WIRE_VERSION, "r-1", 2.5, "127.0.0.1", 4711, b"t" * 16, b"\xc0")


@given(
    bodies=st.lists(st.binary(max_size=300), max_size=12), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=40)
)
def test_frames_survive_any_cutting(bodies: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(frame(FrameKind.DATA, n, body) for n, body in enumerate(bodies))
    decoder, found, at, step = FrameDecoder(), [], 0, 0
    while at < len(wire):
        size = cuts[step % len(cuts)]
        found += [(kind, number, bytes(body)) for kind, number, body in decoder.feed(wire[at : at + size])]
        at, step = at + size, step + 1
    assert found == [(FrameKind.DATA, n, body) for n, body in enumerate(bodies)]
    assert decoder.buffered_bytes == 0


def test_a_large_frame_in_pieces_is_looked_at_once_it_is_whole() -> None:
    body = bytes(range(256)) * 4096
    wire, decoder = frame(FrameKind.GO, 0, body), FrameDecoder()
    found = [f for at in range(0, len(wire), 4096) for f in decoder.feed(wire[at : at + 4096])]
    assert [(kind, bytes(data)) for kind, _, data in found] == [(FrameKind.GO, body)]


def test_an_oversized_frame_is_refused_by_its_announcement() -> None:
    decoder = FrameDecoder(max_frame_bytes=100)
    with pytest.raises(errors.StreamGap, match="101 bytes"):
        decoder.feed(frame(FrameKind.DATA, 0, b"x" * 101)[:9])


def items_of(*groups: list[int]) -> list[tuple[int, bytes]]:
    """The number and body of the DATA frames of these groups of items."""
    found, sent = [], 0
    for group in groups:
        [(_, number, body)] = FrameDecoder().feed(data_frame(sent, [encode_value(item) for item in group]))
        found.append((number, bytes(body)))
        sent += len(group)
    return found


def test_numbered_frames_give_their_items() -> None:
    sequence = ItemSequence()
    found = [item for number, body in items_of([1, 2, 3], [4], [5, 6]) for item in sequence.data(number, body)]
    sequence.end(6)
    assert found == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_missing_frame_is_a_gap(left_out: int) -> None:
    sequence, frames = ItemSequence(), items_of([1, 2, 3], [4, 5, 6], [7])
    del frames[left_out]

    def read() -> None:
        for number, body in frames:
            sequence.data(number, body)
        sequence.end(7)

    with pytest.raises(errors.StreamGap, match="items are missing") as raised:
        read()
    assert raised.value.retryable
    assert raised.value.details["expected"] < raised.value.details["found"]


def test_a_repeated_frame_is_a_gap() -> None:
    sequence, [(number, body)] = ItemSequence(), items_of([1, 2])
    sequence.data(number, body)
    with pytest.raises(errors.StreamGap, match="repeated"):
        sequence.data(number, body)


def test_a_damaged_body_is_a_gap() -> None:
    with pytest.raises(errors.StreamGap, match="cannot be read"):
        ItemSequence().data(0, b"\xdd\x00")


def test_headers_come_back_equal() -> None:
    assert decode_header(encode_header(HEADER)) == HEADER


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", encode_value({"a": 1}), encode_value([1, "r"])])
def test_nonsense_is_no_header(data: bytes) -> None:
    with pytest.raises(errors.InvalidRequest):
        decode_header(data)


def test_another_version_is_refused_by_name() -> None:
    header = RequestHeader(WIRE_VERSION + 1, "r-1", None, "127.0.0.1", 1, b"", None)
    with pytest.raises(errors.InvalidRequest, match=f"version {WIRE_VERSION + 1}"):
        decode_header(encode_header(header))


def test_errors_keep_type_message_and_details() -> None:
    error = decode_error(encode_error(errors.WorkerBusy("full", retry_after_s=1.5)))
    assert (type(error), error.message, error.details) == (errors.WorkerBusy, "full", {"retry_after_s": 1.5})


def test_details_that_cannot_travel_are_shown() -> None:
    error = decode_error(encode_error(errors.EngineError("broken", cause=ValueError("x"))))
    assert error.details == {"cause": "ValueError('x')"}


@pytest.mark.parametrize("body", [b"\xc1", encode_value([1])])
def test_an_unreadable_error_is_still_an_error(body: bytes) -> None:
    assert isinstance(decode_error(body), errors.RemoteError)


def test_dataclasses_travel_as_dicts() -> None:

    @dataclass
    class Chunk:
        text: str

    assert decode_value(encode_value(Chunk("a"))) == {"text": "a"}


def test_a_value_above_the_frame_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the frame limit"):
        encode_value(bytes(MAX_FRAME_BYTES))


# --- request log
# The `x-request-id` in log lines: what is accepted, and how far it reaches.


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
