"""A request with extras: prepared as one generation or several, and their answers as one stream of items.

Beside what a plain response item has (`components.pipeline`), an item has the `index` of its choice, and perhaps
`logprobs` ([token, log probability, [[token, log probability], …]] of each of its tokens; a prompt's first has null)
and `calls` ([number, id, name, piece of the arguments]; of a call that goes on, id and name are null). `usage` comes in
an item of its own, the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from dynamo_local.components import messages
from dynamo_local.components.dispatcher import Batch, Dispatcher
from dynamo_local.components.messages import TextRequest
from dynamo_local.components.sim_api.patterns import PatternError, text_matching
from dynamo_local.components.sim_api.requests import Extras, Form, FunctionTool, Tools
from dynamo_local.components.sim_api.schema_values import MAX_CHARS, value_of
from dynamo_local.components.text.prepare import Answer, Kind, Prepared, prepare
from dynamo_local.errors import EngineError, InvalidRequest
from dynamo_local.kv_hashes import token_bytes
from dynamo_local.ports import SamplingExtras, TokenLogprobs

if TYPE_CHECKING:
    from dynamo_local.components.text.tokenizer import Tokenizer


# --- scripts
# What the sim engine is to answer where a request asks for more than nonsense: the text, and which part of it is
# what.
#
# The engine knows tokens only, so the Processor writes the text, and the engine answers its tokens. It depends on the
# prompt's tokens and the seed alone: a request that is repeated elsewhere stays the same.

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


MAX_QUEUED = 64
"""Items of all choices that wait for the Frontend; beyond it the choices wait."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation. `first` marks the first of its prompt, whose prompt tokens count."""

    index: int
    first: bool
    prepared: Prepared
    script: Script | None
    echo: str
    auto: bool
    """Calls that end it are told by `tool_calls` as the reason (as vLLM: not where one tool was named)."""


def prepare_choices(kind: Kind, asked: TextRequest, tokenizer: Tokenizer, max_model_len: int) -> list[Choice]:
    """All generations of a request, in the order of their indices. Raises `InvalidRequest`."""
    extras = asked.extras or Extras()
    if extras.n > 1 and asked.temperature == 0:
        raise InvalidRequest(f"n must be 1 when using greedy sampling (temperature 0), got {extras.n}", param="n")
    prompts = [asked.prompt] if extras.prompts is None else extras.prompts
    choices: list[Choice] = []
    for prompt in prompts:
        one = prepare(kind, msgspec.structs.replace(asked, prompt=prompt), tokenizer, max_model_len)
        echo = "" if not extras.echo else prompt if isinstance(prompt, str) else tokenizer.decode(one.token_ids)
        written: list[tuple[Script, tuple[int, ...]] | None] = []
        for n in range(extras.n):
            if n < MAX_DISTINCT:
                written.append(_written(asked, extras, one, tokenizer, n))
            script = written[n % MAX_DISTINCT]
            prepared = _of_choice(one, asked, extras, script[1] if script else (), n)
            auto = extras.tools is not None and extras.tools.name is None
            choices.append(Choice(len(choices), n == 0, prepared, script[0] if script else None, echo, auto))
    return choices


def _written(
    asked: TextRequest, extras: Extras, one: Prepared, tokenizer: Tokenizer, n: int
) -> tuple[Script, tuple[int, ...]] | None:
    """What the sim engine is to answer, and its tokens; None: what it likes."""
    if extras.tools is None and extras.form is None:
        return None
    draw = draw_of(one.token_ids, (asked.seed or 0) + n)
    script = None
    if extras.tools is not None:
        script = tool_script(extras.tools, asked.messages[-1].role if asked.messages else "", draw)
    if script is None and extras.form is not None:
        script = form_script(extras.form, draw)
    if script is None:
        return None
    text = "".join(part.text for part in script)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    param = extras.form.param if extras.form is not None else "tools"
    if not token_ids or tokenizer.decode(token_ids) != text:
        message = "the answer that this asks for cannot be written with the model's tokens (a special token's text?)"
        raise InvalidRequest(message, param=param)
    return script, tuple(token_ids)


def _of_choice(one: Prepared, asked: TextRequest, extras: Extras, script: tuple[int, ...], n: int) -> Prepared:
    """With the choice's own seed (the request's plus `n`, as vLLM) and what the engine must know of the extras."""
    seed = None if asked.seed is None and n == 0 else (asked.seed or 0) + n
    sampling = replace(one.sampling, seed=seed)
    if script:
        sampling = replace(sampling, ignore_eos=False, min_tokens=0)
    known = {} if extras.sampling is None else msgspec.structs.asdict(extras.sampling)
    told = SamplingExtras(
        logprobs=extras.logprobs,
        prompt_logprobs=extras.logprobs if extras.echo else None,
        script=script,
        **{**known, "bad_words": tuple(known.get("bad_words") or ())},
    )
    return replace(one, sampling=sampling if told == SamplingExtras() else replace(sampling, extras=told))


class _ChoiceAnswer(Answer):
    """One choice's items, with what the extras add."""

    def __init__(self, choice: Choice, extras: Extras, tokenizer: Tokenizer, request_id: str) -> None:
        prepared = choice.prepared
        detokenizer = tokenizer.detokenizer(
            prepared.stop,
            prepared.sampling.min_tokens,
            include_stop=extras.include_stop,
            keep_special=extras.keep_special,
        )
        super().__init__(prepared, detokenizer)
        self._choice = choice
        self._text_of = tokenizer.token_text
        self._echo = choice.echo
        self._wants = extras.logprobs
        self._numbers: list[TokenLogprobs] = []
        self._of_prompt: list[TokenLogprobs] = []
        self._cutter = None if choice.script is None else Cutter(choice.script)
        self._request_id = request_id

    def _merge(self, batch: Batch) -> tuple[list[int], str | None]:
        for item in batch:
            self._numbers += item.get("logprobs") or ()
            self._of_prompt += item.get("prompt_logprobs") or ()
        return super()._merge(batch)

    def take(self, batch: Batch) -> list[dict[str, Any]]:
        return [self._with_extras(item) for item in super().take(batch)]

    def _with_extras(self, item: dict[str, Any]) -> dict[str, Any]:
        item["index"] = self._choice.index
        if self._cutter is not None and item["text"]:
            self._cut(self._cutter, item)
        if item["num_tokens"] and self._wants is not None:
            count = item["num_tokens"]
            numbers, self._numbers = [*self._of_prompt, *self._numbers[:count]], self._numbers[count:]
            self._of_prompt = []
            item["logprobs"] = [self._told(one) for one in numbers]
        if self._echo and (item["num_tokens"] or item["finish_reason"]):
            item["text"], self._echo = self._echo + item["text"], ""
        if item["finish_reason"] == "stop" and self._choice.auto and self._cutter is not None and self._cutter.called:
            item["finish_reason"] = "tool_calls"
        return item

    def _cut(self, cutter: Cutter, item: dict[str, Any]) -> None:
        text, calls = "", []
        for part, number, begins, piece in cutter.feed(item["text"]):
            if part.kind == "content":
                text += piece
            else:
                calls.append([number, self._call_id(number) if begins else None, part.name if begins else None, piece])
        item["text"] = text
        if calls:
            item["calls"] = calls

    def _call_id(self, number: int) -> str:
        name = f"{self._request_id}/{self._choice.index}/{number}".encode()
        return f"chatcmpl-tool-{blake2b(name, digest_size=8).hexdigest()}"

    def _told(self, one: TokenLogprobs) -> list[Any]:
        """With texts for ids; of the alternatives only as many as were asked for."""
        if not one:  # a prompt's first token: nothing comes before it
            return [self._text_of(self._choice.prepared.token_ids[0]), None, []]
        texts = [[self._text_of(token), value] for token, value in one[: max(1, self._wants or 0)]]
        return [*texts[0], texts[: self._wants]]


class Choices:
    """One request under way."""

    def __init__(
        self,
        choices: list[Choice],
        extras: Extras,
        request_id: str,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        timeout_s: float | None,
    ) -> None:
        self._choices = choices
        self._extras = extras
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._timeout_s = timeout_s
        self._usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        self._cached = 0

    async def run(self) -> AsyncGenerator[dict[str, Any], None]:
        """The items of all choices as they come, and the usage. The first failure ends them all, and is raised."""
        prompt_tokens = sum(len(choice.prepared.token_ids) for choice in self._choices if choice.first)
        source = self._generate(self._choices[0]) if len(self._choices) == 1 else self._together()
        async with contextlib.aclosing(source) as items:
            async for item in items:
                if "prompt_tokens" in item:
                    item["prompt_tokens"] = prompt_tokens
                if item["usage"] is not None:
                    self._count(self._choices[item["index"]], item["usage"])
                    item["usage"] = None
                yield item
        details = {"prompt_tokens_details": {"cached_tokens": self._cached}}
        yield {"index": 0, "text": "", "num_tokens": 0, "finish_reason": None, "usage": {**self._usage, **details}}

    def _count(self, choice: Choice, usage: dict[str, Any]) -> None:
        """As OpenAI says: what was generated for all choices, and each prompt once."""
        prompt = usage["prompt_tokens"] if choice.first else 0
        self._usage["prompt_tokens"] += prompt
        self._usage["completion_tokens"] += usage["completion_tokens"]
        self._usage["total_tokens"] += prompt + usage["completion_tokens"]
        if choice.first:
            self._cached += usage["prompt_tokens_details"]["cached_tokens"]

    async def _together(self) -> AsyncGenerator[dict[str, Any], None]:
        queue: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue(MAX_QUEUED)
        tasks = [asyncio.create_task(self._feed(choice, queue.put)) for choice in self._choices]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, choice: Choice, put: Callable[[Any], Any]) -> None:
        try:
            async with contextlib.aclosing(self._generate(choice)) as items:
                async for item in items:
                    await put(item)
            await put(None)
        except Exception as error:  # whoever reads the queue raises it
            await put(error)

    async def _generate(self, choice: Choice) -> AsyncGenerator[dict[str, Any], None]:
        prepared = choice.prepared
        name = self._request_id if len(self._choices) == 1 else f"{self._request_id}-{choice.index}"
        answer = _ChoiceAnswer(choice, self._extras, self._tokenizer, self._request_id)
        payload = messages.generate_request(name, prepared.token_ids, prepared.sampling)
        batches = self._dispatcher.send(
            payload, request_id=name, tokens=prepared.sampling.max_tokens, timeout_s=self._timeout_s
        )
        async with contextlib.aclosing(batches):
            async for batch in batches:
                for item in answer.take(batch):
                    yield item
                if answer.finish_reason is not None:
                    return
        raise EngineError(f"the worker's answer to {name} ended without a finish reason")
