"""The runtime `http`: a server with OpenAI's API, a health and a metrics URL (plain `vllm serve`, SGLang, …).

Its worker takes requests from our Frontend (`components.commands.http_frontend`) and passes them on. So the worker's
own registration is the server's place in the routing, and a drain takes both out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from dynamo_local.components.commands.child import Child
from dynamo_local.components.commands.config import CommandConfig
from dynamo_local.components.commands.launch import HTTP
from dynamo_local.components.commands.probe import get, get_ok, wait_ok
from dynamo_local.components.commands.runner import ChildSilent, CommandWorker, Sample, UnroutedDriver
from dynamo_local.components.commands.sleep import HookCommands, ServerSleep, SleepHooks, probe, why_not
from dynamo_local.components.proxy.messages import Ask
from dynamo_local.core.types import Missing, Role
from dynamo_local.errors import ConfigError, FlipFailed
from dynamo_local.sdk.checks import listing
from dynamo_local.sdk.context import Work, WorkerContext
from dynamo_local.sdk.service import async_on_start, endpoint, on_shutdown

if TYPE_CHECKING:
    from dynamo_local.components.commands.http_calls import ServerCalls
    from dynamo_local.components.commands.metrics import ServerNumbers


# --- A server that changes its role (prefill or decode) on an HTTP request.
#
# SGLang's `POST /pd_role_switch` (0.5.21, sgl-project/sglang#28403) answers `{"success", "message", …}`, 200 or 400. It
# refuses while anything runs or is kept, and while another change is under way; the role that it has already it takes
# for a success.

log = logging.getLogger("dynamo_local.worker")

ROLE = "{role}"
DEFAULT_BODY: Mapping[str, Any] = {"new_role": ROLE}
SWITCH_TIMEOUT_S = 240.0
"""A server that captures its decode graphs anew takes as long as for a start."""
AGAIN_S = 0.2
SOON = ("not idle", "in progress")
"""Words of a refusal that passes by itself: something just ended, or another change goes on."""
SHOWN_CHARS = 200


async def switch_role(url: str, body: Mapping[str, Any], role: str) -> None:
    """Return when the server says that it has that role. Raises `FlipFailed` in its words; may be cancelled, and then
    nobody knows which role it has."""
    import httpx

    body_with_role = {key: role if value == ROLE else value for key, value in body.items()}
    why = "it did not answer"
    try:
        async with asyncio.timeout(SWITCH_TIMEOUT_S), httpx.AsyncClient(timeout=None, trust_env=False) as client:
            while True:
                answer = await client.post(url, json=body_with_role)
                why = _refusal(answer.status_code, answer.text)
                if not why:
                    return
                if not any(word in why for word in SOON):
                    break
                log.info("the server does not become %s yet: %s", role, why)
                await asyncio.sleep(AGAIN_S)
    except (TimeoutError, httpx.HTTPError) as error:
        why = f"{type(error).__name__}: {error}; {why}"
    raise FlipFailed(f"the server does not become {role}: {url} says: {why}")


def _refusal(status: int, text: str) -> str:
    """Why it has not changed its role; empty where it has."""
    try:
        answered = json.loads(text)
    except ValueError:
        answered = None
    said = answered if isinstance(answered, dict) else {}
    if http.client.OK <= status < http.client.MULTIPLE_CHOICES and said.get("success") is not False:
        return ""
    return f"{status}: {said.get('message') or text}"[:SHOWN_CHARS]


PORT = "http"
HEALTH_EVERY_S = 0.05


class HttpConfig(CommandConfig):
    """Keys of a section with `runtime: http`. The command listens on `{port:http}`."""

    needs_ports: ClassVar[tuple[str, ...]] = (PORT,)

    health: str = "/health"
    """Path that answers 200 once the server takes requests."""
    metrics: str | None = "/metrics"
    """Path of its Prometheus metrics; null: it has none. Then its KV use is not known, and no planner scales by it."""
    served_model_name: str | None = Field(default=None, min_length=1)
    """The model's name in the API, for a server without `/v1/models`."""
    must_serve: tuple[str, ...] = ()
    """Models that the server must list. The section `Models` writes this."""
    role_switch: str | None = None
    """Path whose POST gives the server its other role, so that its worker can flip; SGLang's is /pd_role_switch."""
    role_switch_body: dict[str, Any] = Field(default_factory=lambda: dict(DEFAULT_BODY))
    """The JSON that is posted there, with {role} for the new role. The default is SGLang's."""

    def why_no_standby(self) -> str | None:
        return None if self.sleep_hook is not None else why_not(self.words)

    @model_validator(mode="after")
    def _paths(self) -> Self:
        for name in ("health", "metrics", "role_switch"):
            path = getattr(self, name)
            if path is not None and not path.startswith("/"):
                raise ValueError(f"{name} must be a path such as /{name}, not {path!r}")
        if self.role is Role.FRONTEND:
            raise ValueError(
                "role frontend: our own Frontend is before servers of the runtime http; "
                "give a frontend that is a command the runtime none"
            )
        return self


@dataclass(frozen=True, slots=True)
class Model:
    """One of those that a server serves. `max_model_len` is in tokens, None where it does not say."""

    name: str
    max_model_len: int | None
    created_s: float


def parse_models(text: str) -> tuple[Model, ...]:
    """The answer of `/v1/models`. Raises `ValueError` where it is none."""
    try:
        data = json.loads(text)["data"]
        return tuple(
            Model(str(model["id"]), _whole(model.get("max_model_len")), float(_whole(model.get("created")) or 0))
            for model in data
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no list of models: {type(error).__name__}: {error}") from None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class HttpDriver(UnroutedDriver):
    """`components.commands.runner.Driver` of an HTTP server."""

    def __init__(self, config: HttpConfig, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}"
        self._config = config
        self._calls: ServerCalls | None = None
        self._before: ServerNumbers | Missing = Missing("it was not asked yet")
        self._moved_s = time.monotonic()
        self.models: tuple[Model, ...] = ()
        self._counts_itself = False
        self.served: Mapping[str, float] = {}
        """From its latest metrics. A server that does not count its requests has those of our connections."""

    @property
    def calls(self) -> ServerCalls:
        """Our connections to the server, made at the first use."""
        if self._calls is None:
            from dynamo_local.components.commands.http_calls import ServerCalls

            self._calls = ServerCalls(self.base_url)
        return self._calls

    async def wait_ready(self) -> None:
        await wait_ok(self.base_url + self._config.health, HEALTH_EVERY_S)
        if self._config.role is not Role.OTHER:
            self.models = await self._ask_models()
            lengths = [model.max_model_len for model in self.models if model.max_model_len is not None]
            self.calls.streams.bound_if_unsaid = max(lengths, default=0)

    async def _ask_models(self) -> tuple[Model, ...]:
        if self._config.served_model_name is not None:
            return (Model(self._config.served_model_name, None, 0.0),)
        url = f"{self.base_url}/v1/models"
        status, text = await get(url)
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            raise ConfigError(
                f"{url} wants an API key ({status}): the server listens on loopback, so start it without one, "
                "or say `served-model-name`; clients' own keys are passed on"
            )
        try:
            models = parse_models(text) if status == http.client.OK else ()
        except ValueError as error:
            raise ConfigError(f"{url}: {error}; say `served-model-name` in its section") from None
        if not models:
            raise ConfigError(f"{url} lists no model (it answers {status}); say `served-model-name` in its section")
        names = [model.name for model in models]
        if missing := [name for name in self._config.must_serve if name not in names]:
            raise ConfigError(
                f"the server calls its models {listing(names)}, and requests come for {listing(missing)}. Name it so "
                f"in its command: --served-model-name {missing[0]} (vLLM, SGLang) or --alias {missing[0]} (llama.cpp). "
                "Or give the model in the section Models the server's name"
            )
        return models

    def facts(self) -> Mapping[str, str]:
        """Where it listens: `dynamo profile` asks it there."""
        return {"server_url": self.base_url}

    async def sample(self) -> Sample:
        """From its metrics; without a metrics URL, from its health and our own connections."""
        from dynamo_local.components.commands import metrics as http_metrics

        numbers: ServerNumbers | Missing = Missing("the server has no metrics URL (`metrics` in its section)")
        self.served = {}
        if self._config.metrics is not None:
            scrape = await self._scrape(self.base_url + self._config.metrics)
            numbers, self.served = http_metrics.read(scrape), http_metrics.served_of(scrape)
        else:
            await get_ok(self.base_url + self._config.health)
        self._counts_itself |= bool(self.served)
        if not self._counts_itself:
            self.served = self.calls.streams.served.counters()
        own = self.calls.streams.own()
        load = http_metrics.load_of(numbers, own, self._before)
        now_s = time.monotonic()
        if numbers != self._before:
            self._before, self._moved_s = numbers, now_s
        hands_over = self._config.role is Role.PREFILL
        held = http_metrics.in_flight(numbers, own, now_s - self._moved_s, hands_over=hands_over)
        return Sample(load, held)

    async def _scrape(self, url: str) -> Any:
        from dynamo_local.components.commands.metrics_text import Metrics

        text = await get_ok(url)
        try:
            return Metrics(text)
        except ValueError as error:
            raise ChildSilent(f"{url} gives no Prometheus text: {error}") from None

    async def close(self) -> None:
        """Close our connections."""
        if self._calls is not None:
            await self._calls.close()


class HttpWorker(CommandWorker):
    """A worker beside an HTTP server."""

    runtime = HTTP
    driver: HttpDriver
    config: HttpConfig

    def make_driver(self, context: WorkerContext, child: Child) -> HttpDriver:
        return HttpDriver(context.settings, child.launch.ports[PORT])

    def make_hooks(self) -> SleepHooks:
        def model() -> str | None:
            return self.driver.models[0].name if self.driver.models else None

        if self.config.sleep_hook is None:
            return ServerSleep(self.driver.base_url, model)
        return HookCommands(self.context, self.child, lambda: probe(self.driver.base_url, model()))

    @async_on_start
    async def register(self) -> None:
        """Say which models are served here, or prefilled."""
        from dynamo_local.components.models_view import ModelCard, model_key_prefix, prefill_models_prefix

        context = self.context
        context.set_served_source(lambda: self.driver.served)
        for model in self.driver.models:
            card = ModelCard(model.name, context.component, "generate", model.max_model_len, model.created_s)
            if self.config.role is Role.PREFILL:
                prefix = prefill_models_prefix(context.namespace) + model.name
            else:
                prefix = model_key_prefix(context.namespace, model.name)
            await context.register_key(prefix, card.encode())

    @endpoint()
    async def generate(self, request: Ask) -> AsyncGenerator[Any, None]:
        """A POST of our Frontend; see `components.proxy.messages`."""
        async with contextlib.aclosing(self.driver.calls.answer(request)) as items:
            async for item in items:
                yield item

    def work(self) -> Work:
        """Requests of others in the server; our own are counted by the endpoint already."""
        own = self.driver.calls.streams.own().streams
        held = 0 if isinstance(self.sampled, Missing) else self.sampled.in_flight
        return Work(unnamed=max(0, held - own))

    # --- changing its role (sdk.flipping.FlipsIdle) ----------------------------------------------

    def hand_over(self) -> Mapping[str, Any]:
        """The server stays, and is found by its port."""
        return {}

    async def until_idle(self) -> None:
        """As a drain's end: SGLang changes its role only then."""
        await self.drain()

    async def try_out(self) -> None:
        """Give the server its new role. Raises `FlipFailed`."""
        await self._switch()

    async def go_back(self) -> None:
        """Give the server this role again. If it has this role already, that is a success. Otherwise the worker
        ends."""
        back = self.context.vital(self._switch(), "giving the server its role back")
        await asyncio.wait({back})
        back.result()

    async def settle(self) -> None:
        """It had nothing in hand any more before the flip."""

    async def _switch(self) -> None:
        path = self.config.role_switch
        if path is None:
            raise FlipFailed("its section names no call that changes the server's role (`role-switch`)")
        await switch_role(self.driver.base_url + path, self.config.role_switch_body, self.config.role)

    @on_shutdown
    async def close(self) -> None:
        """Close our connections to the server."""
        await self.driver.close()


CONFIG = HttpConfig
COMPONENT = HttpWorker
