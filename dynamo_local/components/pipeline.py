"""One Processor's work without the process around it: an OpenAI body in, response items out.

The first item comes as soon as a worker has taken the request (`num_tokens: 0` and `prompt_tokens`); the last has a
`finish_reason` and the `usage`. Tokens that arrived in one frame become one item.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import TYPE_CHECKING, Any

from dynamo_local.components import messages
from dynamo_local.components.dispatcher import Batch, Dispatcher
from dynamo_local.components.limits import run_beside, run_by_size
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.text.prepare import Answer, Kind, prepare
from dynamo_local.errors import EngineError, NoWorkers
from dynamo_local.transport.requests.stream import Enough, Take

if TYPE_CHECKING:
    from dynamo_local.components.text.tokenizer import Tokenizer

FIRST_CARD_TIMEOUT_S = 1.0
"""How long a request waits for the first model card: only right after the start, while etcd is being read."""


async def _and_enough(room: Awaitable[None]) -> None:
    await room
    raise Enough


def _without_reason(generate: Mapping[str, Any]) -> EngineError:
    return EngineError(f"the worker's answer to {generate['request_id']} ended without a finish reason")


class Answering:
    """One request's answer, which is worked on while it is read or pumped: see `Pipeline.run` and `pump`."""

    def __init__(self, pipeline: Pipeline, kind: Kind, payload: Any, timeout_s: float | None) -> None:
        self._pipeline = pipeline
        self._asked = (kind, payload, timeout_s)

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._pipeline.run(*self._asked)

    async def pump(self, take: Take) -> None:
        """Call `take` with the items as they arrive."""
        await self._pipeline.pump(*self._asked, take)


class Pipeline:
    """Prepares a request, has it dispatched, and turns the tokens into text. `model` is the one meant by default."""

    def __init__(self, tokenizer: Tokenizer, models: ModelsView, dispatcher: Dispatcher, model: str) -> None:
        self._tokenizer = tokenizer
        self._models = models
        self._dispatcher = dispatcher
        self._model = model

    def answering(self, kind: Kind, payload: Any, timeout_s: float | None) -> Answering:
        """What an endpoint answers with."""
        return Answering(self, kind, payload, timeout_s)

    async def run(self, kind: Kind, payload: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """Response items of a `TextRequest`, or of what one is made from.

        Raises `InvalidRequest`, `NoWorkers`, `WorkerBusy`, or what the worker failed with.
        """
        asked = messages.parse_text_request(payload)
        max_model_len = await self._max_model_len(asked.model or self._model)
        if asked.extras is not None:
            async with contextlib.aclosing(self._with_extras(kind, asked, max_model_len, timeout_s)) as items:
                async for item in items:
                    yield item
            return
        generate, answer = await self._prepared(kind, asked, max_model_len)
        batches = self._dispatcher.send(
            generate, request_id=generate["request_id"], tokens=answer.max_tokens, timeout_s=timeout_s
        )
        async with contextlib.aclosing(batches):
            async for batch in batches:
                for item in answer.take(batch):
                    yield item
                if answer.finish_reason is not None:
                    return  # a stop string: closing the batches aborts the request in the engine
        raise _without_reason(generate)

    async def pump(self, kind: Kind, payload: Any, timeout_s: float | None, take: Take) -> None:
        """As `run`: `take` is called with the items as they arrive, without a task in between."""
        asked = messages.parse_text_request(payload)
        if asked.extras is not None:
            async with contextlib.aclosing(self.run(kind, asked, timeout_s)) as one_by_one:
                async for item in one_by_one:
                    if (room := take([item])) is not None:
                        await room
            return
        max_model_len = await self._max_model_len(asked.model or self._model)
        generate, answer = await self._prepared(kind, asked, max_model_len)

        def taken(batch: Batch) -> Awaitable[None] | None:
            items = answer.take(batch)
            room = take(items) if items else None
            if answer.finish_reason is None or batch[-1].get("finish_reason") is not None:
                return room
            # A stop string: closing the stream aborts the request in the engine.
            if room is None:
                raise Enough
            return _and_enough(room)

        with contextlib.suppress(Enough):
            await self._dispatcher.pump(
                generate, taken, request_id=generate["request_id"], tokens=answer.max_tokens, timeout_s=timeout_s
            )
        if answer.finish_reason is None:
            raise _without_reason(generate)

    async def _prepared(
        self, kind: Kind, asked: messages.TextRequest, max_model_len: int
    ) -> tuple[dict[str, Any], Answer]:
        """What a worker is asked, and what its answer becomes."""
        request = await run_by_size(messages.size_of(asked), prepare, kind, asked, self._tokenizer, max_model_len)
        request_id = request.request_id or uuid.uuid4().hex
        generate = messages.generate_request(request_id, request.token_ids, request.sampling)
        return generate, Answer(request, self._tokenizer.detokenizer(request.stop, request.sampling.min_tokens))

    async def _with_extras(
        self, kind: Kind, asked: messages.TextRequest, max_model_len: int, timeout_s: float | None
    ) -> AsyncGenerator[Any, None]:
        from dynamo_local.components.sim_api.choices import Choices, prepare_choices

        extras = asked.extras
        assert extras is not None
        work = (kind, asked, self._tokenizer, max_model_len)
        if extras.form or extras.tools:  # what a schema costs is not seen from its size
            choices = await run_beside(prepare_choices, *work)
        else:
            choices = await run_by_size(messages.size_of(asked), prepare_choices, *work)
        request_id = asked.request_id or uuid.uuid4().hex
        run = Choices(choices, extras, request_id, self._tokenizer, self._dispatcher, timeout_s).run()
        async with contextlib.aclosing(run) as items:
            async for item in items:
                yield item

    async def texts(self, payload: Any) -> dict[str, Any]:
        """The answer to a `TextsRequest`. Raises `InvalidRequest` or `NoWorkers`."""
        from dynamo_local.components.sim_api.texts import answer_texts, parse_texts_request

        asked = parse_texts_request(payload)
        max_model_len = await self._max_model_len(asked.request.model or self._model)
        size = messages.size_of(asked.request) + len(asked.token_ids)
        return await run_by_size(size, answer_texts, asked, self._tokenizer, max_model_len)

    async def _max_model_len(self, model: str) -> int:
        """The context length of the model's workers, in tokens. Raises `NoWorkers` while none serves it."""
        served = self._models.get(model)
        if served is None and await self._models.wait_ready(FIRST_CARD_TIMEOUT_S):
            served = self._models.get(model)
        if served is None or served.max_model_len is None:  # None: an HTTP server's model, no Processor can call it
            names = ", ".join(m.name for m in self._models.models()) or "none"
            raise NoWorkers(f"no ready worker serves the model {model!r} (served now: {names})")
        return served.max_model_len
