"""The bytes of a prefill queue entry."""

from __future__ import annotations

from array import array
from types import MappingProxyType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.errors import InvalidRequest
from dynamo_local.transport.prefill_queue import HEADROOM_BYTES, decode_entry, encode_entry

NATS_DEFAULT_BYTES = 1 << 20


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_survive(ids: list[int]) -> None:
    payload = {"request": {"prompt_token_ids": ids}, "stop_token_ids": ids}
    assert decode_entry(encode_entry(payload, NATS_DEFAULT_BYTES)) == payload


def test_token_ids_take_four_bytes_each() -> None:
    """Whatever their values; little-endian, so that the bytes mean the same everywhere."""
    data = encode_entry({"prompt_token_ids": [1, 2**31 - 1] * 65_536}, NATS_DEFAULT_BYTES)
    assert 131_072 * 4 <= len(data) < 131_072 * 4 + 64
    assert b"\x01\x00\x00\x00\xff\xff\xff\x7f" in data


def test_sequences_other_than_lists_are_taken() -> None:
    payload = MappingProxyType({"a": {"token_ids": (1, 2)}, "b_token_ids": array("i", [3])})
    assert decode_entry(encode_entry(payload, NATS_DEFAULT_BYTES)) == {"a": {"token_ids": [1, 2]}, "b_token_ids": [3]}


def test_the_bound_leaves_room_for_headers() -> None:
    """`max_payload` counts them too; the error says how many tokens would fit."""
    fits = (NATS_DEFAULT_BYTES - HEADROOM_BYTES) // 4 - 16
    encode_entry({"prompt_token_ids": [0] * fits}, NATS_DEFAULT_BYTES)
    with pytest.raises(InvalidRequest, match="about 261,120 prompt tokens") as caught:
        encode_entry({"prompt_token_ids": [0] * (fits + 16)}, NATS_DEFAULT_BYTES)
    assert caught.value.details == {"param": "prompt"}


@pytest.mark.parametrize(
    "payload",
    [{"token_ids": [2**31]}, {"token_ids": [1.5]}, {"token_ids": ["a"]}, {"x": object()}, {1.5: {2: object()}}],
)
def test_what_cannot_be_encoded_is_refused(payload: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be encoded"):
        encode_entry(payload, NATS_DEFAULT_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(9, b"")}),
        msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, b"abc")}),
    ],
)
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a prefill entry"):
        decode_entry(data)
