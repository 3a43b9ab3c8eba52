"""The wire: what travels over NATS, and the frames of a response stream. Pure; no I/O.

A request is one NATS message: a msgpack `RequestHeader`, the payload in it where that is small. A refusal
is the NATS reply: `errors.to_wire` as msgpack. Everything else travels over one connection per request,
which the *worker* opens to the caller, on this host:

    worker -> caller   HELLO  the one-time token                        "I take it"
    caller -> worker   GO     the payload, unless it came by NATS       "it is still wanted": only now the handler runs
    worker -> caller   DATA   a msgpack array of items, as many as were ready
    worker -> caller   END | ERROR | END_KEPT

After END_KEPT the caller may ask again, on the same connection and without NATS:

    caller -> worker   ASK    a `RequestHeader` with the payload
    worker -> caller   TAKEN  "I take it"; or ERROR, a refusal
    worker -> caller   DATA, then END | ERROR | END_KEPT, as before

A frame is a 9 byte prefix `>IBI` (body length in bytes, kind, number) and a body. A DATA frame's number is how many
items went before it. END's number is how many there were in all. So one lost or repeated frame cannot go unnoticed,
whatever its size.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from dynamo_local import errors
from dynamo_local.transport.decoding import UNREADABLE, decode

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""The largest body of one frame, hence of one request payload and of one item."""

MAX_INLINE_BYTES: Final = 128 * 1024
"""Larger payloads travel by TCP. NATS refuses messages above 1 MiB unless configured; 100k prompt tokens are 300 KB."""

TOKEN_BYTES: Final = 16

_PREFIX: Final = struct.Struct(">IBI")
PREFIX_BYTES: Final = _PREFIX.size
_ARRAY32: Final = struct.Struct(">BI")


class FrameKind(enum.IntEnum):
    """The second field of the prefix."""

    HELLO = 1
    GO = 2
    DATA = 3
    ERROR = 4
    END = 5
    ASK = 6
    TAKEN = 7
    END_KEPT = 8


class Frame(NamedTuple):
    """One frame off the wire; `body` is still encoded."""

    kind: int
    number: int
    body: bytes | memoryview


RequestId = Annotated[str, msgspec.Meta(max_length=512)]
"""The client's `x-request-id` and a few digits: 137 at most. It stands in log lines."""


class RequestHeader(msgspec.Struct, array_like=True):
    """The NATS message. `payload` is encoded msgpack, None where it follows in the GO frame."""

    version: int
    request_id: RequestId
    remaining_s: float | None
    host: str
    port: int
    token: bytes
    payload: bytes | None
    x_request_id: str = ""
    """For the log of the worker; empty for requests that no client has made. Older callers do not send it."""
    socket: str = ""
    """The name of an abstract unix socket to which the answer may come, too, which costs less than TCP. Older callers
    have none, and older workers take the port."""
    keep: bool = False
    """Whether the caller can ask again on the unix socket's connection. Older callers cannot."""
    until_s: float | None = None
    """When the caller of an ASK gives up waiting for TAKEN, by the clock that all processes of a host share
    (`time.monotonic`). If the caller has given up, a worker that resumes late drops the request."""
    trace: dict[str, str] | None = None
    """The headers of the trace that the request is a part of (`system.tracing`); None: of none. Older callers do not
    send it."""


WIRE_VERSION: Final = 1

_encoder = msgspec.msgpack.Encoder()
_error_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_decoder = msgspec.msgpack.Decoder()
_header_decoder = msgspec.msgpack.Decoder(RequestHeader)
_items_decoder = msgspec.msgpack.Decoder(list[Any])


def encode_value(value: Any) -> bytes:
    """msgpack of a payload or an item. TypeError if msgpack cannot encode it; ValueError past the frame limit."""
    data = _encoder.encode(value)
    if len(data) > MAX_FRAME_BYTES - _ARRAY32.size:
        raise ValueError(f"a value of {len(data)} bytes exceeds the frame limit of {MAX_FRAME_BYTES} bytes")
    return data


def decode_value(data: bytes | memoryview) -> Any:
    """Plain Python values: dataclasses come back as dicts, tuples as lists. `InvalidRequest` on nonsense."""
    return _decoded(_decoder, data)


Decode = Callable[[bytes | memoryview], Any]


def decoder_of(model: type | None) -> Decode:
    """The decoder of payloads for an endpoint that takes `model`.

    A msgspec `Struct` is decoded directly, and unknown fields are skipped. `NoneType`: the payload is not read. Any
    other model, or none: the payload becomes plain values first.
    """
    if model is NoneType:
        return lambda _: None
    if model is None or not issubclass(model, msgspec.Struct):
        return decode_value
    return partial(_decoded, msgspec.msgpack.Decoder(model))


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    try:
        return decode(decoder, data)
    except msgspec.ValidationError as error:
        raise invalid_payload(error) from error
    except UNREADABLE as error:
        raise errors.InvalidRequest(f"a message is not msgpack: {error}") from error


def invalid_payload(error: msgspec.ValidationError) -> errors.InvalidRequest:
    """msgspec's complaint, with the parameter named."""
    param = str(error).rpartition("$.")[2].rstrip("`").partition("[")[0]
    return errors.InvalidRequest(f"{param}: {error}" if param else str(error), param=param)


def encode_header(header: RequestHeader) -> bytes:
    """The header as it is sent; `decode_header` reads it."""
    return _encoder.encode(header)


def decode_header(data: bytes) -> RequestHeader:
    """Raises `InvalidRequest` for anything that is not a request of this version."""
    try:
        header = decode(_header_decoder, data)
    except UNREADABLE as error:
        raise errors.InvalidRequest(f"not a request header: {error}") from error
    if header.version != WIRE_VERSION:
        raise errors.InvalidRequest(
            f"the caller speaks version {header.version} of the request format, this worker version {WIRE_VERSION}: "
            "run both from one installation"
        )
    return header


def encode_error(error: BaseException) -> bytes:
    """`errors.to_wire` as msgpack; details that msgpack cannot carry travel as their `repr`."""
    return _error_encoder.encode(errors.to_wire(error))


def decode_error(data: bytes | memoryview) -> errors.DynamoError:
    """The inverse; a body that is no error becomes a `RemoteError` that says so."""
    try:
        wire = decode(_decoder, data)
    except UNREADABLE as error:
        return errors.RemoteError(f"an error frame could not be read: {error}", type="DecodeError")
    if not isinstance(wire, dict):
        return errors.RemoteError(f"an error frame holds {type(wire).__name__}", type="DecodeError")
    return errors.from_wire(wire)


def frame(kind: FrameKind, number: int = 0, body: bytes = b"") -> bytes:
    """One frame, ready for the socket."""
    return _PREFIX.pack(len(body), kind, number) + body


def data_frame(number: int, items: Sequence[bytes]) -> bytes:
    """A DATA frame of items that are encoded already; `number` counts the items before it."""
    body = b"".join((_ARRAY32.pack(0xDD, len(items)), *items))
    return _PREFIX.pack(len(body), FrameKind.DATA, number) + body


class FrameDecoder:
    """Bytes in, whole frames out. A frame above `max_frame_bytes` is refused before it is buffered."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._needed = PREFIX_BYTES

    @property
    def buffered_bytes(self) -> int:
        """Bytes received of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order. Raises `StreamGap` on a frame that cannot be one."""
        if self._buffer:
            self._buffer += data
            # A large frame comes in hundreds of pieces: look at it again only when it is whole.
            if len(self._buffer) < self._needed:
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        view, at, found = memoryview(data), 0, []
        self._needed = PREFIX_BYTES
        while len(data) - at >= PREFIX_BYTES:
            length, kind, number = _PREFIX.unpack_from(data, at)
            if length > self.max_frame_bytes:
                raise errors.StreamGap(
                    f"a frame announces {length} bytes, the limit is {self.max_frame_bytes}: the stream is damaged"
                )
            end = at + PREFIX_BYTES + length
            if end > len(data):
                self._needed = PREFIX_BYTES + length
                break
            found.append(Frame(kind, number, view[at + PREFIX_BYTES : end]))
            at = end
        self._buffer += view[at:]
        return found


class ItemSequence:
    """The receiving half of the numbering: items of whole frames out, `StreamGap` as soon as one is missing."""

    def __init__(self) -> None:
        self.received = 0

    def data(self, number: int, body: bytes | memoryview) -> list[Any]:
        """The items of a DATA frame."""
        self._check(number, "data")
        try:
            items = decode(_items_decoder, body)
        except UNREADABLE as error:
            raise errors.StreamGap(f"item {self.received} cannot be read: {error}") from error
        self.received += len(items)
        return items

    def end(self, number: int) -> None:
        """An END frame: all that were sent must have come."""
        self._check(number, "end")

    def _check(self, number: int, what: str) -> None:
        if number != self.received:
            lost = "missing" if number > self.received else "repeated"
            raise errors.StreamGap(
                f"the {what} frame continues at item {number}, but {self.received} came before it: items are {lost}; "
                "send the request again",
                expected=self.received,
                found=number,
            )
