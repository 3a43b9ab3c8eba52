"""Traffic from a Prometheus server, by its HTTP API. The questions and what the answers mean: `promql`."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dynamo_local.clock import Clock
from dynamo_local.core.traffic import ACCEPT_LENGTH_METRICS, ENDED, HISTOGRAMS, HIT_RATE_METRIC, STARTED
from dynamo_local.core.types import Missing
from dynamo_local.planner.values import Traffic

if TYPE_CHECKING:
    import httpx


# --- promql
# The queries to a Prometheus server about a window, and the meaning of its answers. Pure.
#
# Each number is an instant query, an increase over the window by model and namespace. A number without a series is
# unknown,
# never 0. A rate needs two scrapes within the window: it must be longer than twice the interval of the scrapes.

Metrics = Literal["frontend", "router"]
PREFIXES: Mapping[Metrics, str] = {"frontend": "dynamo_frontend_", "router": "dynamo_component_router_"}
BY = "sum by (model,dynamo_namespace)"
NOW = "vector(time())"
"""The server's time: all other questions are asked about that moment, or means of sums and counts would not fit."""
ACCEPTED, DRAFTS = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"
MEANS = ("ttft_s", "itl_s", "duration_s", "isl", "osl")


@dataclass(frozen=True, slots=True)
class Series:
    """One element of a query's result: its labels, and its value."""

    labels: Mapping[str, str]
    value: float


Answers = Mapping[str, tuple[Series, ...]]
"""The answers, by the names of `queries`."""


def queries(metrics: Metrics, window_s: float) -> dict[str, str]:
    """PromQL by name, for the metrics of Dynamo's (or our) frontends, or those of Dynamo's routers."""
    prefix, window = PREFIXES[metrics], f"[{round(window_s * 1000)}ms]"
    requested = {
        "started": f"{BY}(increase({prefix}{STARTED}{window}))",
        "ended": f"{BY}(increase({prefix}{ENDED}{window}))",
        "started_at": f"{BY.replace('sum', 'max')}(timestamp({prefix}{STARTED}))",
        "ended_at": f"{BY.replace('sum', 'max')}(timestamp({prefix}{ENDED}))",
        "hit_rate_sum": f"{BY}(increase({HIT_RATE_METRIC}_sum{window}))",
        "hit_rate_count": f"{BY}(increase({HIT_RATE_METRIC}_count{window}))",
        "accepted": f"{BY}(increase({ACCEPTED}{window}))",
        "drafts": f"{BY}(increase({DRAFTS}{window}))",
    }
    for name in MEANS:
        for part in ("sum", "count"):
            requested[f"{name}_{part}"] = f"{BY}(increase({prefix}{HISTOGRAMS[name]}_{part}{window}))"
    for metric in ACCEPT_LENGTH_METRICS:
        requested[metric] = f"avg by (model,dynamo_namespace)(avg_over_time({metric}{window}))"
    return requested


def traffic_of(
    answers: Answers, *, model: str | None, namespace: str, window_s: float, server_s: float, now_s: float
) -> Traffic | Missing:
    """The window, of that model's series (None: of all), in that namespace or without one. `server_s` is the server's
    time of the answers, `now_s` the planner's."""

    def total(name: str) -> float | None:
        return _total(answers.get(name, ()), model, namespace)

    counted = next((kind for kind in ("started", "ended") if total(kind) is not None), None)
    if counted is None:
        return Missing(f"Prometheus has no two scrapes of the number of requests in the last {window_s:g} s")
    scraped = _chosen(answers.get(f"{counted}_at", ()), model, namespace)
    if not scraped:
        return Missing("the number of requests is not scraped any more")
    age_s = max(0.0, server_s - max(one.value for one in scraped))

    def mean(name: str, factor: float = 1.0) -> float | Missing:
        count, amount = total(f"{name}_count"), total(f"{name}_sum")
        if count is None or amount is None:
            return Missing(f"Prometheus has no {name}")
        return factor * amount / count if count > 0 else Missing("no request in the window")

    hit_rate = mean("hit_rate")
    return Traffic(
        at_s=now_s - age_s,
        duration_s=window_s,
        num_req=max(0.0, total(counted) or 0.0),
        isl=mean("isl"),
        osl=mean("osl"),
        ttft_ms=mean("ttft_s", 1000.0),
        itl_ms=mean("itl_s", 1000.0),
        request_duration_s=mean("duration_s"),
        kv_hit_rate=hit_rate if isinstance(hit_rate, Missing) else min(1.0, max(0.0, hit_rate)),
        accept_length=_accept_length(answers, model, namespace),
    )


def _accept_length(answers: Answers, model: str | None, namespace: str) -> float | Missing:
    accepted, drafts = (_total(answers.get(name, ()), model, namespace) for name in ("accepted", "drafts"))
    if accepted is not None and drafts:
        return 1.0 + accepted / drafts
    for metric in ACCEPT_LENGTH_METRICS:
        reported = [one.value for one in _chosen(answers.get(metric, ()), model, namespace)]
        if reported:
            return sum(reported) / len(reported)
    return Missing("Prometheus has no metric of speculation")


def _chosen(series: Iterable[Series], model: str | None, namespace: str) -> list[Series]:
    return [one for one in series if math.isfinite(one.value) and _is_ours(one.labels, model, namespace)]


def _is_ours(labels: Mapping[str, str], model: str | None, namespace: str) -> bool:
    """Labels that are not there are no objection: our Frontend has no namespace, an engine may have no model."""
    reported, where = labels.get("model", ""), labels.get("dynamo_namespace", "")
    of_model = model is None or not reported or reported.lower() == model.lower()
    return of_model and where.replace("-", "_") in ("", namespace.replace("-", "_"))


def _total(series: Iterable[Series], model: str | None, namespace: str) -> float | None:
    """None where there is no series of ours."""
    values = [one.value for one in _chosen(series, model, namespace)]
    return sum(values) if values else None


log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 4.5
"""All questions about a window together, whatever a single one may take: below the deadline of the observation."""
TRIES = 2
RETRY_S = 0.2
AT_ONCE = 4
ANSWER_BYTES_MAX = 4 * 1024 * 1024
TOKEN_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class PrometheusOptions:
    """Where the server is, and what of it is asked for.

    `token_file` is read for each request, so that the token may change. `ca_bundle` is a file of
    certificates that are trusted; with `ssl_verify` False all are. `model` None: of all models.
    """

    endpoint: str
    metrics: Metrics = "frontend"
    namespace: str = "dynamo"
    model: str | None = None
    token_file: Path | None = None
    ca_bundle: Path | None = None
    ssl_verify: bool = True
    extra_query_params: Mapping[str, str] = field(default_factory=dict)
    request_timeout_s: float = 10.0


class _Vector(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: list[_Vector]


class _Reply(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


_decoder = msgspec.json.Decoder(_Reply)


class _Refused(Exception):
    """The server cannot be asked, or what it said is no answer; `again` may help."""

    def __init__(self, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.again = again


class PrometheusTraffic:
    """`planner.sources.TrafficSource`. Nothing is connected before the first question; `close` ends the connections."""

    def __init__(self, options: PrometheusOptions, clock: Clock) -> None:
        self.options = options
        self._clock = clock
        self._client: httpx.AsyncClient | None = None

    async def traffic(self, window_s: float) -> Traffic | Missing:
        """See `TrafficSource`. Takes `ANSWER_WITHIN_S` at most, or `request_timeout_s` where that is less."""
        options, requested = self.options, queries(self.options.metrics, window_s)
        within_s = min(options.request_timeout_s, ANSWER_WITHIN_S)
        try:
            async with asyncio.timeout(within_s):
                headers = await asyncio.to_thread(_headers, options)
                client = await self._connected()
                gate = asyncio.Semaphore(AT_ONCE)
                server_s = _time(await self._ask(client, gate, {"query": NOW}, headers), options.endpoint)
                async with asyncio.TaskGroup() as group:
                    asking = {
                        name: group.create_task(
                            self._ask(client, gate, {"query": query, "time": f"{server_s:.3f}"}, headers)
                        )
                        for name, query in requested.items()
                    }
        except TimeoutError:
            return Missing(f"Prometheus at {options.endpoint} did not answer within {within_s:g} s")
        except _Refused as error:
            return Missing(str(error))
        except ExceptionGroup as errors:
            refused = errors.subgroup(_Refused)
            if refused is None or len(refused.exceptions) < len(errors.exceptions):
                log.exception("asking Prometheus failed unexpectedly")
            return Missing(str(errors.exceptions[0]) or type(errors.exceptions[0]).__name__)
        return traffic_of(
            {name: task.result() for name, task in asking.items()},
            model=options.model,
            namespace=options.namespace,
            window_s=window_s,
            server_s=server_s,
            now_s=self._clock.now_s(),
        )

    async def close(self) -> None:
        """End the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx  # the arbiter loads it only where there is a server to be asked

            verify = await asyncio.to_thread(_trust, self.options)
            # Variables of a shell must not send the token through a proxy.
            self._client = httpx.AsyncClient(verify=verify, trust_env=False, timeout=self.options.request_timeout_s)
        return self._client

    async def _ask(
        self,
        client: httpx.AsyncClient,
        gate: asyncio.Semaphore,
        params: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> tuple[Series, ...]:
        """The result of a query. Raises `_Refused`."""
        for left in reversed(range(TRIES)):
            try:
                async with gate:
                    return await self._ask_once(client, params, headers)
            except _Refused as error:
                if not left or not error.again:
                    raise
            await asyncio.sleep(RETRY_S)
        raise AssertionError("unreachable")

    async def _ask_once(
        self, client: httpx.AsyncClient, params: Mapping[str, str], headers: Mapping[str, str]
    ) -> tuple[Series, ...]:
        import httpx

        where = self.options.endpoint
        url, words = where.rstrip("/") + "/api/v1/query", {**self.options.extra_query_params, **params}
        try:
            async with client.stream("GET", url, params=words, headers=dict(headers)) as reply:
                body = bytearray()
                async for part in reply.aiter_bytes():
                    body += part
                    if len(body) > ANSWER_BYTES_MAX:
                        raise _Refused(f"the answer of Prometheus at {where} is too long", again=False)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise _Refused(f"Prometheus at {where} cannot be asked: {why}", again=True) from error
        return _result(reply.status_code, bytes(body), where)


def _result(status: int, body: bytes, where: str) -> tuple[Series, ...]:
    """Raises `_Refused` for what is no answer."""
    try:
        said = _decoder.decode(body)
        if status == 200 and said.status == "success" and said.data is not None:
            return tuple(Series(one.metric, float(one.value[1])) for one in said.data.result)
        why = said.error or f"status {status}"
    except (msgspec.DecodeError, RecursionError, ValueError):
        why = f"status {status}" if status != 200 else "it is no answer to a query"
    raise _Refused(f"Prometheus at {where} answers {why}", again=status >= 500)


def _time(series: tuple[Series, ...], where: str) -> float:
    """Raises `_Refused` where it is none."""
    if len(series) == 1 and math.isfinite(series[0].value):
        return series[0].value
    raise _Refused(f"Prometheus at {where} does not say what time it is", again=False)


def _headers(options: PrometheusOptions) -> dict[str, str]:
    if options.token_file is None:
        return {}
    try:
        with options.token_file.open(encoding="ascii") as file:
            token = file.read(TOKEN_BYTES_MAX).strip()
    except (OSError, ValueError) as error:  # the text of a decoding error would show some of the token
        why = error.strerror if isinstance(error, OSError) else "it holds more than ASCII"
        raise _Refused(f"the token for Prometheus, {options.token_file}, cannot be read: {why}", again=False) from None
    if not token or not token.isprintable() or " " in token:
        raise _Refused(f"{options.token_file} holds no token for Prometheus: one word is expected", again=False)
    return {"Authorization": f"Bearer {token}"}


def _trust(options: PrometheusOptions) -> Any:
    if not options.ssl_verify:
        return False
    if options.ca_bundle is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(options.ca_bundle))
    except (OSError, ValueError) as error:
        raise _Refused(f"the CA bundle {options.ca_bundle} cannot be read: {error}", again=False) from error
