"""What the sim engine is to answer where a request asks for more than nonsense: the text, and which part of it is what.

The engine knows tokens only, so the Processor writes the text, and the engine answers its tokens. It depends on the
prompt's tokens and the seed alone: a request that is repeated elsewhere stays the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec

from dynamo_local.components.extras.asked import Form, FunctionTool, Tools
from dynamo_local.components.extras.nonsense import value_of
from dynamo_local.components.extras.patterns import PatternError, text_matching
from dynamo_local.components.extras.scalars import MAX_CHARS
from dynamo_local.errors import InvalidRequest
from dynamo_local.kv_hashes import token_bytes

MAX_DISTINCT: Final = 8
"""So many choices of one request are written; the others repeat them."""

SECOND_CALL: Final = 0.25
"""How often two tools are called at once, where that is allowed."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the text: the answer itself, the arguments of a call of `name`, or marks that nobody sees."""

    kind: Literal["content", "call", "mark"]
    text: str
    name: str = ""


Script = tuple[Part, ...]


def draw_of(token_ids: Sequence[int], seed: int) -> random.Random:
    """The same for the same prompt and seed, in every process."""
    key = (seed % 2**64).to_bytes(8, "little")
    return random.Random(int.from_bytes(blake2b(token_bytes(token_ids), digest_size=16, key=key).digest(), "little"))


def form_script(form: Form, draw: random.Random) -> Script:
    """An answer of that form. Raises `InvalidRequest` where none can be made."""
    if form.choice is not None:
        return (Part("content", draw.choice(form.choice)),)
    if form.regex is not None:
        try:
            return (Part("content", text_matching(form.regex, draw, MAX_CHARS)),)
        except PatternError as error:
            raise InvalidRequest(str(error), param=form.param) from None
    return (Part("content", _json(value_of(form.json, draw, form.param))),)


def tool_script(tools: Tools, last_role: str, draw: random.Random) -> Script | None:
    """The calls; None: text is to be answered.

    With `auto` a user's message is answered by a call, anything else (a tool's result) by text, so that an agent's loop
    ends.
    """
    if tools.choice == "none" or (tools.choice == "auto" and tools.name is None and last_role != "user"):
        return None
    if tools.name is not None:
        chosen = [function for function in tools.functions if function.name == tools.name]
    else:
        several = tools.parallel and len(tools.functions) > 1 and draw.random() < SECOND_CALL
        chosen = draw.sample(tools.functions, 2 if several else 1)
    return tuple(part for function in chosen for part in _call(function, draw))


def _call(function: FunctionTool, draw: random.Random) -> Iterator[Part]:
    """As Hermes's models write a call."""
    schema: Any = function.parameters
    if schema in (None, True, {}):
        schema = {"type": "object", "additionalProperties": False}
    elif isinstance(schema, dict) and not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref", "const", "enum"}:
        schema = {"type": "object", **schema}
    arguments = value_of(schema, draw, "tools")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"the parameters of the tool {function.name!r} must be an object's schema", param="tools")
    yield Part("mark", f'<tool_call>\n{{"name": {_json(function.name)}, "arguments": ')
    yield Part("call", _json(arguments), function.name)
    yield Part("mark", "}\n</tool_call>\n")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class Cutter:
    """Cuts the text as it comes into the script's parts."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._at = 0
        self._used = 0
        self._calls = -1
        self.called = False
        """Whether a call has begun."""

    def feed(self, text: str) -> Iterator[tuple[Part, int, bool, str]]:
        """(part, number of the call, whether it begins here, its piece of the text) of what is to be seen."""
        while text and self._at < len(self._script):
            part = self._script[self._at]
            piece, text = text[: len(part.text) - self._used], text[len(part.text) - self._used :]
            begins = self._used == 0
            self._used += len(piece)
            if self._used == len(part.text):
                self._at, self._used = self._at + 1, 0
            if part.kind == "call":
                self._calls += begins
                self.called = True
            if part.kind != "mark":
                yield part, self._calls, begins, piece
