"""Decodes msgpack from NATS, which any client may have sent."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dynamo_local.system import collector

SMALL_BYTES: Final = 4096

UNREADABLE: Final = (msgspec.DecodeError, RecursionError)
"""The errors of `decode`: nonsense, a wrong type, or nesting deeper than Python allows."""


def decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    """Raises one of `UNREADABLE`.

    While a decoder makes millions of small values, the garbage collector walks through them again and again. 8 MB took
    nine seconds with it, and a third of a second without. A small message cannot hold so many values.
    """
    if len(data) < SMALL_BYTES:
        return decoder.decode(data)
    with collector.paused():
        return decoder.decode(data)
