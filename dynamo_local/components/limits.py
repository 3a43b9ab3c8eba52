"""Bounds of one request that are not the operator's to choose: far above what any client of vLLM sends, and low enough
that a request costs no more than its size. docs/security.md lists them, with the test of each."""

from __future__ import annotations

from typing import Final

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
