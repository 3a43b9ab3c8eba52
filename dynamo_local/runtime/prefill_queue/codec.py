"""The bytes of a prefill queue entry: msgpack, with token ids as little-endian int32.

A list of 131,072 token ids is up to 655 kB as plain msgpack and 524,288 bytes here, whatever their values;
so a prompt of 128k tokens fits NATS's default `max_payload` of 1 MiB. The bound is a quarter of `max_payload`: about
260,000 tokens there, 2 million with the embedded server's 8 MiB.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_local.errors import InvalidRequest
from dynamo_local.runtime.decoding import UNREADABLE, decode

HEADROOM_BYTES = 4096
"""Kept free below the server's `max_payload`, which counts the headers too."""

_TOKEN_IDS = 1  # msgpack extension code
_INT32 = "i"
assert array(_INT32).itemsize == 4, "array('i') must be 32 bits wide"  # true on every platform CPython supports


def encode_entry(payload: Mapping[str, Any], max_payload_bytes: int) -> bytes:
    """Encode; values under keys that end in `token_ids` must be sequences of int32 and come back as lists.

    Raises `InvalidRequest` for what cannot be encoded, and for more than `max_payload_bytes` less the headroom.
    """
    try:
        data = msgspec.msgpack.encode(_pack(payload))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a prefill entry cannot be encoded: {error}") from error
    limit = max_payload_bytes - HEADROOM_BYTES
    if len(data) > limit:
        raise InvalidRequest(
            f"a prefill entry of {len(data):,} bytes is over the {limit:,} bytes that NATS takes "
            f"(about {limit // 4:,} prompt tokens); prefill it locally, or raise max_payload in the NATS server",
            param="prompt",
        )
    return data


def decode_entry(data: bytes) -> dict[str, Any]:
    """The inverse of `encode_entry`. Raises `InvalidRequest` for bytes that are no entry."""
    try:
        entry = decode(_decoder, data)
    except (*UNREADABLE, ValueError) as error:
        raise InvalidRequest(f"not a prefill entry: {error}") from error
    if not isinstance(entry, dict):
        raise InvalidRequest(f"not a prefill entry: a {type(entry).__name__} instead of a mapping")
    return entry


def _unpack_ext(code: int, data: memoryview) -> list[int]:
    if code != _TOKEN_IDS:
        raise ValueError(f"unknown extension {code}")
    ids = array(_INT32)
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


_decoder = msgspec.msgpack.Decoder(ext_hook=_unpack_ext)


def _pack(value: Any, key: Any = None) -> Any:
    if isinstance(value, Mapping):
        return {k: _pack(v, k) for k, v in value.items()}
    if isinstance(key, str) and key.endswith("token_ids") and isinstance(value, Sequence):
        ids = array(_INT32, value)
        if sys.byteorder == "big":
            ids.byteswap()
        return msgspec.msgpack.Ext(_TOKEN_IDS, ids.tobytes())
    return value
