"""Bounds of one request that the operator cannot choose. They are far above what a client of vLLM sends, and low
enough that a request costs no more than its size. docs/security.md lists them, with the test of each."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from dynamo_local.system.executors import DaemonExecutor

MAX_STOP_STRINGS: Final = 64
MAX_STOP_LENGTH: Final = 1024
"""Characters of one stop string."""

MAX_STOP_TOKEN_IDS: Final = 1024

MAX_MESSAGES: Final = 2048
"""Messages of a chat; also the text parts of one message."""

MAX_PROMPT_IDS: Final = 2**20
"""Token ids of a prompt that is given as such; the model's own context may be shorter, and is looked at later."""

MAX_STOP_BYTES: Final = 2**20
"""The JSON of `stop`: as many and as long as allowed, each character written as two `\\uXXXX`, is below it."""

MAX_FIELD_BYTES: Final = 64 * 1024
"""The JSON of any other field but the prompt itself."""

MAX_CHOICES: Final = 128
"""Generations of one request: `n` times its prompts."""

MAX_LOGPROBS: Final = 20
"""Alternatives at each token: vLLM's `max_logprobs`, and OpenAI's bound."""

MAX_TOOLS: Final = 128
"""Tools of one request, and calls in one message of the history."""

MAX_TOOLS_BYTES: Final = 2**20
"""The JSON of `tools`."""

MAX_SCHEMA_BYTES: Final = 256 * 1024
"""The JSON of `response_format` or `structured_outputs`."""

MAX_PATTERN_LENGTH: Final = 4096
"""Characters of a regular expression."""

MAX_BAD_WORDS: Final = 1024
"""Words of `bad_words`, tokens of `logit_bias`."""

MAX_NAME_LENGTH: Final = 64
"""Characters of a client's own word (such as an unknown parameter) that an error or a log line repeats."""

MAX_MODEL_SHOWN: Final = 200
"""Characters of a model's name that an error repeats: long enough for the path of a folder. In JSON each may take six
bytes."""

LARGE_BYTES: Final = 64 * 1024
"""A body or prompt above this is parsed and tokenised beside the event loop, one after the other."""


MAX_NESTING: Final = 128
"""Objects and lists within each other in schemas, tools and arguments."""


def nested_deeper(value: object, most: int = MAX_NESTING) -> bool:
    """Whether what was read of JSON is nested deeper."""
    if isinstance(value, dict):
        return not most or any(nested_deeper(each, most - 1) for each in value.values())
    if isinstance(value, list):
        return not most or any(nested_deeper(each, most - 1) for each in value)
    return False


def shortened(text: str, length: int = MAX_NAME_LENGTH) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= length else f"{text[:length]}…"


# --- A large request is parsed, rendered and tokenised in one thread beside the event loop, which carries all tokens.
# The thread takes one request at a time, so several large requests take no more of the loop's time than one.

P = ParamSpec("P")
T = TypeVar("T")

TRIM_BYTES: Final = 4 * LARGE_BYTES
"""After a request of this size we collect young garbage, and ask the C library to give free memory back. The
collection may otherwise be late (`system.collector.serving`): an error and its frames, one of which has the body,
hold each other. The C library keeps what lies below anything that is still used, up to a hundred megabytes after a
few bodies of eight."""

TRIM_AFTER_S: Final = 1.0
"""All that was made of the request is gone by then."""

_LARGE: Final = DaemonExecutor("large request", threads=1)
_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # glibc's; others need none


async def run_beside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)` in the thread, whatever its size: for what costs more than is seen from that."""
    return await asyncio.get_running_loop().run_in_executor(_LARGE, lambda: work(*args, **kwargs))


async def run_by_size(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)`: at once for what is small (bytes or characters), in the thread for what is not."""
    if size <= LARGE_BYTES:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_LARGE, lambda: work(*args, **kwargs))
    finally:
        if size >= TRIM_BYTES:
            loop.call_later(TRIM_AFTER_S, _give_back)


def _give_back() -> None:
    gc.collect(1)  # on the loop, where what it finds belongs; young values only
    _LARGE.submit(_malloc_trim, 0)
