"""A server in a process of its own that streams completions, a token each `PACE_S` to each client. Prints its port."""

from __future__ import annotations

import asyncio
import re
import time

PACE_S = 0.005
TOKENS = 64
_EVENT = b'data: {"object":"text_completion","model":"m","choices":[{"index":0,"text":" word"}]}\n\n'
_END = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % TOKENS
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    assert length is not None
    await reader.readexactly(int(length[1]))
    writer.write(_HEAD)
    due_s = time.monotonic()
    for _ in range(TOKENS):
        writer.write(_chunk(_EVENT))
        due_s += PACE_S
        await asyncio.sleep(due_s - time.monotonic())
    writer.write(_chunk(_END) + b"0\r\n\r\n")
    writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main())
