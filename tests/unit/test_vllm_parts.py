"""The machine code of other cards is taken out of a library (`tests.gpu.vllm_parts`), and nothing else moves."""

from __future__ import annotations

import struct

import pytest

from tests.gpu.vllm_parts import CUBIN, MAGIC, PTX, trim

HEAD_BYTES = 64


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """One with these entries: kind and architecture; the code is 8 bytes, all the architecture's number."""
    body = b""
    for kind, arch in entries:
        head = struct.pack("<HHIQ", kind, 1, HEAD_BYTES, 8).ljust(28, b"\0") + struct.pack("<I", arch)
        body += head.ljust(HEAD_BYTES, b"\0") + bytes([arch] * 8)
    return MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([(CUBIN, 80), (CUBIN, 90), (PTX, 90)], [1]),
        ([(CUBIN, 80), (PTX, 75), (PTX, 80), (PTX, 100)], [2]),
        ([(CUBIN, 100)], []),
    ],
)
def test_one_card_s_code_is_kept(entries: list[tuple[int, int]], kept: list[int]) -> None:
    data = bytearray(b"before" + fat_binary(*entries) + b"after" + MAGIC + b"no fat binary")
    before = bytes(data)
    assert trim(data, 90) == 8 * (len(entries) - len(kept))
    assert len(data) == len(before)
    for n, (_, arch) in enumerate(entries):
        begin = len(b"before") + 16 + n * (HEAD_BYTES + 8) + HEAD_BYTES
        assert data[begin : begin + 8] == (bytes([arch] * 8) if n in kept else bytes(8))
    assert data.endswith(b"after" + MAGIC + b"no fat binary")
