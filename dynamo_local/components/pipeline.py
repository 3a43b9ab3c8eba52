"""In the Processor: an OpenAI body in, response items out.

The first item comes as soon as a worker has taken the request (`num_tokens: 0` and `prompt_tokens`). The last one has a
`finish_reason` and the `usage`. Tokens that arrived in one frame become one item.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.components.dispatcher import NEW_WORKER_S, Batch, Dispatcher
from dynamo_local.components.limits import run_beside, run_by_size
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.text.prepare import Answer, Kind, prepare
from dynamo_local.errors import EngineError, NoWorkers, StreamGap, WorkerLost
from dynamo_local.system import tracing
from dynamo_local.transport.requests.stream import Enough, Take, batches_of

if TYPE_CHECKING:
    from dynamo_local.components.text.tokenizer import Tokenizer

FIRST_CARD_TIMEOUT_S = 1.0
"""How long a request waits for the first model card: only right after the start, while etcd is being read."""


async def _and_enough(until_free: Awaitable[None]) -> None:
    await until_free
    raise Enough


class Answering:
    """One request's answer. The request plane pumps it; `async for` is for user code."""

    def __init__(self, pump: Callable[[Take], Coroutine[Any, Any, None]]) -> None:
        self.pump = pump

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(batches_of(self.pump)) as batches:
            async for batch in batches:
                for item in batch:
                    yield item


class Pipeline:
    """Prepares a request, has it dispatched, and turns the tokens into text. `model` is the one meant by default."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        models: ModelsView,
        dispatcher: Dispatcher,
        model: str,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or AsyncioClock()
        self._tokenizer = tokenizer
        self._models = models
        self._dispatcher = dispatcher
        self._model = model

    def answering(self, kind: Kind, payload: Any, timeout_s: float | None) -> Answering:
        """The answer of an endpoint: response items of a `TextRequest`, or of what one is made from."""
        return Answering(partial(self.pump, kind, payload, timeout_s))

    async def pump(self, kind: Kind, payload: Any, timeout_s: float | None, take: Take) -> None:
        """Calls `take` with the response items as they arrive.

        Raises `InvalidRequest`, `NoWorkers`, `WorkerBusy`, or what the worker failed with.
        """
        with tracing.span("processor"):
            await self._pumped(kind, payload, timeout_s, take)

    async def _pumped(self, kind: Kind, payload: Any, timeout_s: float | None, take: Take) -> None:
        request = messages.parse_text_request(payload)
        wait_s = NEW_WORKER_S if request.lost else FIRST_CARD_TIMEOUT_S
        max_model_len = await self._max_model_len(request.model or self._model, wait_s)
        work = (kind, request, self._tokenizer, max_model_len)
        request_id, extras = request.request_id or uuid.uuid4().hex, request.extras
        if extras is not None:
            from dynamo_local.components.sim_api.choices import Choices, prepare_choices

            if extras.form or extras.tools:  # the size does not show what a schema costs
                choices = await run_beside(prepare_choices, *work)
            else:
                choices = await run_by_size(messages.size_of(request), prepare_choices, *work)
            generate = partial(self._generate, timeout_s, request.lost)
            await Choices(choices, extras, request_id, self._tokenizer, generate).pump(take)
            return
        prepared = await run_by_size(messages.size_of(request), prepare, *work)
        detokenizer = self._tokenizer.detokenizer(prepared.stop, prepared.sampling.min_tokens)
        generate_request = messages.generate_request(request_id, prepared.token_ids, prepared.sampling)
        answer = Answer(prepared, detokenizer, request.trace_block_size)
        await self._generate(timeout_s, request.lost, generate_request, answer, take)

    async def _generate(
        self, timeout_s: float | None, lost: int, generate: dict[str, Any], answer: Answer, take: Take
    ) -> None:
        """One generation: a worker's tokens become text in the callback in which they arrive."""

        def taken(batch: Batch) -> Awaitable[None] | None:
            items = answer.take(batch)
            until_free = take(items) if items else None
            if answer.finish_reason is None or batch[-1].get("finish_reason") is not None:
                return until_free
            # A stop string: closing the stream aborts the request in the engine.
            if until_free is None:
                raise Enough
            return _and_enough(until_free)

        request_id, began_s = generate["request_id"], self._clock.now_s()
        try:
            await self._dispatcher.pump(
                generate,
                taken,
                request_id=request_id,
                tokens=answer.max_tokens,
                timeout_s=timeout_s,
                chosen=lambda worker: answer.chosen(worker, self._clock.now_s() - began_s),
                resume=partial(answer.continued, generate),
                lost=lost,
            )
        except Enough:
            pass
        except (WorkerLost, StreamGap):
            if answer.finish_reason is None:  # else only the end of the stream is missing
                raise
        if answer.finish_reason is None:
            raise EngineError(f"the worker's answer to {request_id} ended without a finish reason")

    async def texts(self, payload: Any) -> dict[str, Any]:
        """The answer to a `TextsRequest`. Raises `InvalidRequest` or `NoWorkers`."""
        from dynamo_local.components.sim_api.texts import answer_texts, parse_texts_request

        request = parse_texts_request(payload)
        max_model_len = await self._max_model_len(request.request.model or self._model, FIRST_CARD_TIMEOUT_S)
        size = messages.size_of(request.request) + len(request.token_ids)
        return await run_by_size(size, answer_texts, request, self._tokenizer, max_model_len)

    async def _max_model_len(self, model: str, wait_s: float) -> int:
        """The context length of the model's workers, in tokens. Raises `NoWorkers` if none serves it after `wait_s`."""
        served = self._models.get(model)
        if served is None and await self._models.wait_ready(wait_s):
            served = self._models.get(model)
        if served is None or served.max_model_len is None:  # None: an HTTP server's model, no Processor can call it
            names = ", ".join(m.name for m in self._models.models()) or "none"
            raise NoWorkers(f"no ready worker serves the model {model!r} (served now: {names})")
        return served.max_model_len
