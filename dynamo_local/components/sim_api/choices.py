"""In the Processor: a request with extras becomes one generation or several, whose items reach the Frontend together.

An item also has the `index` of its choice. It may have `logprobs` ([token, log probability, [[token, log probability],
…]] of each token; a prompt's first has null) and `calls` ([number, id, name, piece of the arguments]; id and name are
null where a call goes on). The last item alone has `usage`.

The sim engine cannot follow a schema. So the Processor writes the answer (a script), and the engine sends its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynamo_local.components import messages
from dynamo_local.components.dispatcher import Batch
from dynamo_local.components.messages import TextRequest
from dynamo_local.components.sim_api.requests import Extras
from dynamo_local.components.sim_api.schema_values import MAX_CHARS, Unfit, text_matching, value_of
from dynamo_local.components.text.prepare import Answer, Kind, Prepared, prepare
from dynamo_local.errors import InvalidRequest
from dynamo_local.ports import SamplingExtras, TokenLogprobs

if TYPE_CHECKING:
    from dynamo_local.components.text.tokenizer import Tokenizer
    from dynamo_local.transport.requests.stream import Take

MAX_DISTINCT: Final = 8
"""So many choices of one request are written. The others repeat them."""

Script = tuple[tuple[str | None, str], ...]
"""Parts of an answer: (the called function or None, text)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation. `first` marks the first one of its prompt: the prompt's tokens count once."""

    index: int
    first: bool
    prepared: Prepared
    script: Script
    echo: str
    ends_with_calls: bool
    """Its finish reason is `tool_calls` if it called. With a named tool it stays `stop`, as in vLLM."""


def prepare_choices(kind: Kind, asked: TextRequest, tokenizer: Tokenizer, max_model_len: int) -> list[Choice]:
    """All generations of a request, in the order of their indices. Raises `InvalidRequest`."""
    extras = asked.extras or Extras()
    if extras.n > 1 and asked.temperature == 0:
        raise InvalidRequest(f"n must be 1 when using greedy sampling (temperature 0), got {extras.n}", param="n")
    scripts = _Scripts(asked, extras, tokenizer)
    choices: list[Choice] = []
    for prompt in [asked.prompt] if extras.prompts is None else extras.prompts:
        one = prepare(kind, msgspec.structs.replace(asked, prompt=prompt), tokenizer, max_model_len)
        echo = "" if not extras.echo else prompt if isinstance(prompt, str) else tokenizer.decode(one.token_ids)
        for n in range(extras.n):
            script = scripts.of_choice(n)
            prepared = _of_choice(one, asked, extras, scripts.tokens(script), n)
            called = extras.tools is not None and extras.tools.name is None
            choices.append(Choice(len(choices), n == 0, prepared, script, echo, called))
    return choices


class _Scripts:
    """The answers that a request demands. The seed and the choice's number decide among several."""

    def __init__(self, asked: TextRequest, extras: Extras, tokenizer: Tokenizer) -> None:
        self._seed = asked.seed or 0
        self._form, self._tools = extras.form, extras.tools
        self._param = extras.form.param if extras.form is not None else "tools"
        self._tokenizer = tokenizer
        self._texts: dict[str | None, str] = {}
        self._tokens: dict[Script, tuple[int, ...]] = {(): ()}
        # With `auto` a user's message is answered by a call and a tool's result by text, so that an agent's loop ends.
        last = asked.messages[-1].role if asked.messages else ""
        tools = extras.tools
        self._calls = tools is not None and tools.choice != "none" and (tools.choice == "required" or last == "user")

    def of_choice(self, n: int) -> Script:
        tools, number = self._tools, self._seed + n % MAX_DISTINCT
        if tools is not None and self._calls:
            found = [one for one in tools.functions if tools.name in (None, one.name)]
            several = 2 if tools.name is None and tools.parallel and len(found) > 1 and number % 4 == 3 else 1
            names = [found[(number + more) % len(found)] for more in range(several)]
            return tuple((one.name, self._text(one.name, _object_schema(one.parameters))) for one in names)
        if self._form is None:
            return ()
        if self._form.choice is not None:
            return ((None, self._form.choice[number % len(self._form.choice)]),)
        return ((None, self._text(None, self._form.json)),)

    def _text(self, name: str | None, schema: Any) -> str:
        if name not in self._texts:
            if name is None and self._form is not None and self._form.regex is not None:
                try:
                    self._texts[name] = text_matching(self._form.regex, 0, MAX_CHARS)
                except Unfit as error:
                    raise InvalidRequest(str(error), param=self._param) from None
            else:
                value = value_of(schema, "tools" if name is not None else self._param)
                if name is not None and not isinstance(value, dict):
                    message = f"the parameters of the tool {name!r} must be an object's schema"
                    raise InvalidRequest(message, param="tools")
                self._texts[name] = msgspec.json.encode(value).decode()
        return self._texts[name]

    def tokens(self, script: Script) -> tuple[int, ...]:
        if script not in self._tokens:
            text = "".join(part for _, part in script)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if not ids or self._tokenizer.decode(ids) != text:
                message = "the model's tokens cannot write the answer that this asks for (a special token's text?)"
                raise InvalidRequest(message, param=self._param)
            self._tokens[script] = tuple(ids)
        return self._tokens[script]


def _object_schema(schema: Any) -> Any:
    if not schema or schema is True:
        return {"type": "object", "additionalProperties": False}
    typed = schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref", "const", "enum"}
    return schema if typed else {"type": "object", **schema}


def _of_choice(one: Prepared, asked: TextRequest, extras: Extras, script: tuple[int, ...], n: int) -> Prepared:
    """The choice's own seed (the request's plus `n`, as in vLLM), and what the engine must know of the extras."""
    sampling = replace(one.sampling, seed=None if asked.seed is None and n == 0 else (asked.seed or 0) + n)
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
        prepared, sampling = choice.prepared, choice.prepared.sampling
        kept = {"include_stop": extras.include_stop, "keep_special": extras.keep_special}
        super().__init__(prepared, tokenizer.detokenizer(prepared.stop, sampling.min_tokens, **kept))
        self._choice, self._request_id = choice, request_id
        self._text_of = tokenizer.token_text
        self._echo = choice.echo
        self._wants = extras.logprobs
        self._numbers: list[TokenLogprobs] = []
        self._of_prompt: list[TokenLogprobs] = []
        self._parts = list(choice.script)
        self._begins = True
        self._calls = 0

    def _merge(self, batch: Batch) -> tuple[list[int], str | None]:
        for item in batch:
            self._numbers += item.get("logprobs") or ()
            self._of_prompt += item.get("prompt_logprobs") or ()
        return super()._merge(batch)

    def take(self, batch: Batch) -> list[dict[str, Any]]:
        return [self._with_extras(item) for item in super().take(batch)]

    def _with_extras(self, item: dict[str, Any]) -> dict[str, Any]:
        item["index"] = self._choice.index
        if self._parts and self._parts[0][0] is not None:
            item["calls"], item["text"] = self._cut(item["text"]), ""
        if item["num_tokens"] and self._wants is not None:
            count = item["num_tokens"]
            numbers, self._numbers = [*self._of_prompt, *self._numbers[:count]], self._numbers[count:]
            self._of_prompt = []
            item["logprobs"] = [self._named(one) for one in numbers]
        if self._echo and (item["num_tokens"] or item["finish_reason"]):
            item["text"], self._echo = self._echo + item["text"], ""
        if item["finish_reason"] == "stop" and self._choice.ends_with_calls and self._calls:
            item["finish_reason"] = "tool_calls"
        return item

    def _cut(self, text: str) -> list[Any]:
        """The pieces of calls that the text holds."""
        calls: list[Any] = []
        while text and self._parts[0][1]:
            name, left = self._parts[0]
            piece, text = text[: len(left)], text[len(left) :]
            self._calls += self._begins
            id_ = blake2b(f"{self._request_id}/{self._choice.index}/{self._calls}".encode(), digest_size=8).hexdigest()
            told = (f"chatcmpl-tool-{id_}", name) if self._begins else (None, None)
            calls.append([self._calls - 1, *told, piece])
            self._begins = len(piece) == len(left)
            self._parts[0] = (name, left[len(piece) :])
            if self._begins and len(self._parts) > 1:
                del self._parts[0]
        return calls

    def _named(self, one: TokenLogprobs) -> list[Any]:
        """With texts for ids, and as many alternatives as the client asks for."""
        if not one:  # a prompt's first token: nothing comes before it
            return [self._text_of(self._choice.prepared.token_ids[0]), None, []]
        texts = [[self._text_of(token), value] for token, value in one[: max(1, self._wants or 0)]]
        return [*texts[0], texts[: self._wants]]


class Choices:
    """The choices of one request, all under way at once. `generate` sends one generation (`Pipeline.generate`)."""

    def __init__(
        self,
        choices: list[Choice],
        extras: Extras,
        request_id: str,
        tokenizer: Tokenizer,
        generate: Callable[[dict[str, Any], Answer, Take], Awaitable[None]],
    ) -> None:
        self._choices, self._extras, self._request_id, self._tokenizer = choices, extras, request_id, tokenizer
        self._generate = generate
        self._prompt_tokens = sum(len(choice.prepared.token_ids) for choice in choices if choice.first)
        self._completion_tokens = self._cached_tokens = 0
        self._free = asyncio.Event()
        self._free.set()

    async def pump(self, take: Take) -> None:
        """All choices' items as they come, then the usage. The first failure ends them all, and is raised."""
        tasks = [asyncio.ensure_future(self._one(choice, take)) for choice in self._choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
        item = {"index": 0, "text": "", "num_tokens": 0, "finish_reason": None, "usage": usage}
        if (room := take([item])) is not None:
            await room

    async def _one(self, choice: Choice, take: Take) -> None:
        name = self._request_id if len(self._choices) == 1 else f"{self._request_id}-{choice.index}"
        payload = messages.generate_request(name, choice.prepared.token_ids, choice.prepared.sampling)
        answer = _ChoiceAnswer(choice, self._extras, self._tokenizer, self._request_id)
        await self._generate(payload, answer, lambda items: self._give(choice, items, take))

    def _give(self, choice: Choice, items: Sequence[dict[str, Any]], take: Take) -> Awaitable[None] | None:
        for item in items:
            if "prompt_tokens" in item:
                item["prompt_tokens"] = self._prompt_tokens
            if (usage := item["usage"]) is not None:
                self._completion_tokens += usage["completion_tokens"]
                self._cached_tokens += usage["prompt_tokens_details"]["cached_tokens"] if choice.first else 0
                item["usage"] = None
        return self._put(list(items), take)

    def _put(self, items: list[Any], take: Take) -> Awaitable[None] | None:
        """A consumer that is full returns an awaitable. The other choices wait for it, too."""
        if not self._free.is_set():
            return self._later(items, take)
        if (room := take(items)) is None:
            return None
        self._free.clear()
        return self._until_free(room)

    async def _until_free(self, room: Awaitable[None]) -> None:
        try:
            await room
        finally:  # also when its worker is lost and the stream ends: the next attempt must not wait for ever
            self._free.set()

    async def _later(self, items: list[Any], take: Take) -> None:
        await self._free.wait()
        if (room := self._put(items, take)) is not None:
            await room
