"""In the Processor: a request with extras becomes one generation or several, whose items reach the Frontend together.

An item also has the `index` of its choice. It may have `logprobs` ([token, log probability, [[token, log probability],
…]] of each token; a prompt's first has null) and `call` ([id, name, piece of the arguments]; id and name are null where
a call goes on). The last item alone has `usage`.

The sim engine cannot follow a schema. So the Processor writes the answer (a script), and the engine sends its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from dynamo_local.components import messages
from dynamo_local.components.dispatcher import Batch
from dynamo_local.components.messages import TextRequest
from dynamo_local.components.sim_api.requests import Extras, FunctionTool
from dynamo_local.components.sim_api.schema_values import Unfit, text_matching, value_of
from dynamo_local.components.text.prepare import Answer, Kind, Prepared, prepare
from dynamo_local.errors import InvalidRequest
from dynamo_local.ports import SamplingExtras, TokenLogprobs
from dynamo_local.transport.requests.stream import batches_of

if TYPE_CHECKING:
    from dynamo_local.components.text.tokenizer import Tokenizer
    from dynamo_local.transport.requests.stream import Take

T = TypeVar("T")

MAX_DISTINCT: Final = 8
"""So many choices of one request are written. The others repeat them."""


@dataclass(frozen=True, slots=True)
class Script:
    """A text that the answer must be. `tool` is the called function, if the text is its arguments."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    tool: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation. `first` marks the first one of its prompt: the prompt's tokens count once."""

    index: int
    first: bool
    prepared: Prepared
    script: Script
    echo: str


def prepare_choices(kind: Kind, request: TextRequest, tokenizer: Tokenizer, max_model_len: int) -> list[Choice]:
    """All generations of a request, in the order of their indices. Raises `InvalidRequest`."""
    extras = request.extras or Extras()
    if extras.n > 1 and request.temperature == 0:
        raise InvalidRequest(f"n must be 1 when using greedy sampling (temperature 0), got {extras.n}", param="n")
    scripts = _scripts(request, extras, tokenizer) or [Script()]
    choices: list[Choice] = []
    for prompt in [request.prompt] if extras.prompts is None else extras.prompts:
        prepared = prepare(kind, msgspec.structs.replace(request, prompt=prompt), tokenizer, max_model_len)
        echo = "" if not extras.echo else prompt if isinstance(prompt, str) else tokenizer.decode(prepared.token_ids)
        for n in range(extras.n):
            script = scripts[n % len(scripts)]
            own = _of_choice(prepared, request, extras, script.token_ids, n)
            choices.append(Choice(len(choices), n == 0, own, script, echo))
    return choices


def _scripts(request: TextRequest, extras: Extras, tokenizer: Tokenizer) -> list[Script]:
    """The answers of the first choices, if the request demands any. The seed picks the first of several.

    With `auto` a user's message is answered by a call and a tool's result by text, so that an agent's loop ends.
    """

    def picked(options: Sequence[T]) -> list[T]:
        count = min(extras.n, MAX_DISTINCT, len(options))
        return [options[((request.seed or 0) + n) % len(options)] for n in range(count)]

    tools, form = extras.tools, extras.form
    last = request.messages[-1].role if request.messages else ""
    if tools is not None and (tools.choice == "required" or (tools.choice == "auto" and last == "user")):
        called = [one for one in tools.functions if tools.name in (None, one.name)]
        return [_script(_arguments(function), "tools", tokenizer, function.name) for function in picked(called)]
    if form is None:
        return []
    if form.choice is not None:
        return [_script(text, form.param, tokenizer) for text in picked(form.choice)]
    if form.regex is None:
        return [_script(_json(form.json, form.param), form.param, tokenizer)]
    try:
        return [_script(text_matching(form.regex), form.param, tokenizer)]
    except Unfit as error:
        raise InvalidRequest(str(error), param=form.param) from None


def _json(schema: Any, param: str) -> str:
    return msgspec.json.encode(value_of(schema, param)).decode()


def _arguments(tool: FunctionTool) -> str:
    text = _json({} if tool.parameters is None else tool.parameters, "tools")
    if not text.startswith("{"):
        message = f"the parameters of the tool {tool.name!r} must be an object's schema"
        raise InvalidRequest(message, param="tools")
    return text


def _script(text: str, param: str, tokenizer: Tokenizer, tool: str | None = None) -> Script:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids or tokenizer.decode(token_ids) != text:
        message = "the model's tokens cannot write the answer that this asks for (a special token's text?)"
        raise InvalidRequest(message, param=param)
    return Script(text, tuple(token_ids), tool)


def _of_choice(one: Prepared, request: TextRequest, extras: Extras, script: tuple[int, ...], n: int) -> Prepared:
    """The choice's own seed (the request's plus `n`, as in vLLM), and what the engine must know of the extras."""
    sampling = replace(one.sampling, seed=None if request.seed is None and n == 0 else (request.seed or 0) + n)
    if script:
        sampling = replace(sampling, ignore_eos=False, min_tokens=0)
    given = {} if extras.sampling is None else msgspec.structs.asdict(extras.sampling)
    of_engine = SamplingExtras(
        logprobs=extras.logprobs,
        prompt_logprobs=extras.logprobs if extras.echo else None,
        script=script,
        **{**given, "bad_words": tuple(given.get("bad_words") or ())},
    )
    return replace(one, sampling=sampling if of_engine == SamplingExtras() else replace(sampling, extras=of_engine))


class _ChoiceAnswer(Answer):
    """One choice's items, with what the extras add."""

    def __init__(self, choice: Choice, extras: Extras, tokenizer: Tokenizer, request_id: str) -> None:
        prepared, sampling = choice.prepared, choice.prepared.sampling
        kept = {"include_stop": extras.include_stop, "keep_special": extras.keep_special}
        super().__init__(prepared, tokenizer.detokenizer(prepared.stop, sampling.min_tokens, **kept))
        self._choice, self._extras = choice, extras
        self._token_text = tokenizer.token_text
        self._echo = choice.echo
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._call_id = f"chatcmpl-tool-{blake2b(f'{request_id}/{choice.index}'.encode(), digest_size=8).hexdigest()}"
        self._called = False

    def _merge(self, batch: Batch) -> tuple[list[int], str | None]:
        for item in batch:
            self._logprobs += item.get("logprobs") or ()
            self._prompt_logprobs += item.get("prompt_logprobs") or ()
        return super()._merge(batch)

    def take(self, batch: Batch) -> list[dict[str, Any]]:
        return [self._with_extras(item) for item in super().take(batch)]

    def _with_extras(self, item: dict[str, Any]) -> dict[str, Any]:
        item["index"] = self._choice.index
        if (tool := self._choice.script.tool) is not None and item["text"]:
            begins = (None, None) if self._called else (self._call_id, tool)
            item["call"], item["text"], self._called = [*begins, item["text"]], "", True
        if item["num_tokens"] and self._extras.logprobs is not None:
            count = item["num_tokens"]
            own, self._logprobs = [*self._prompt_logprobs, *self._logprobs[:count]], self._logprobs[count:]
            self._prompt_logprobs = []
            item["logprobs"] = [self._with_texts(one) for one in own]
        if self._echo and (item["num_tokens"] or item["finish_reason"]):
            item["text"], self._echo = self._echo + item["text"], ""
        # With a named tool the reason stays `stop`, as in vLLM.
        if item["finish_reason"] == "stop" and self._called and self._extras.tools and not self._extras.tools.name:
            item["finish_reason"] = "tool_calls"
        return item

    def _with_texts(self, one: TokenLogprobs) -> list[Any]:
        """With texts for ids, and as many alternatives as the client asks for."""
        if not one:  # a prompt's first token: nothing comes before it
            return [self._token_text(self._choice.prepared.token_ids[0]), None, []]
        alternatives = self._extras.logprobs or 0
        texts = [[self._token_text(token), value] for token, value in one[: max(1, alternatives)]]
        return [*texts[0], texts[:alternatives]]


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

    async def pump(self, take: Take) -> None:
        """All choices' items as they come, then the usage. The first failure ends them all, and is raised.

        A full consumer stops all choices.
        """
        async with contextlib.aclosing(batches_of(self._all)) as batches:
            async for batch in batches:
                if (until_free := take(batch)) is not None:
                    await until_free

    async def _all(self, take: Take) -> None:
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
        if (until_free := take([item])) is not None:
            await until_free

    async def _one(self, choice: Choice, take: Take) -> None:
        name = self._request_id if len(self._choices) == 1 else f"{self._request_id}-{choice.index}"
        payload = messages.generate_request(name, choice.prepared.token_ids, choice.prepared.sampling)
        answer = _ChoiceAnswer(choice, self._extras, self._tokenizer, self._request_id)
        await self._generate(payload, answer, lambda items: take(self._counted(choice, items)))

    def _counted(self, choice: Choice, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The items, whose usage is added up: the client gets the sum."""
        for item in items:
            if "prompt_tokens" in item:
                item["prompt_tokens"] = self._prompt_tokens
            if (usage := item["usage"]) is not None:
                self._completion_tokens += usage["completion_tokens"]
                self._cached_tokens += usage["prompt_tokens_details"]["cached_tokens"] if choice.first else 0
                item["usage"] = None
        return list(items)
