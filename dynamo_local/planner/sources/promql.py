"""What is asked of a Prometheus server about a window, and what its answers mean. Pure.

Each number is an instant query, an increase over the window by model and namespace. What no series answers is unknown,
never 0. A rate needs two scrapes within the window: it must be longer than twice the interval of the scrapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.traffic import ACCEPT_LENGTH_METRICS, ENDED, HISTOGRAMS, HIT_RATE_METRIC, STARTED
from dynamo_local.core.types import Missing
from dynamo_local.planner.values.traffic import Traffic

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
"""By the name that `queries` gave each."""


def queries(metrics: Metrics, window_s: float) -> dict[str, str]:
    """PromQL by name, for the metrics of Dynamo's (or our) frontends, or those of Dynamo's routers."""
    prefix, window = PREFIXES[metrics], f"[{round(window_s * 1000)}ms]"
    asked = {
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
            asked[f"{name}_{part}"] = f"{BY}(increase({prefix}{HISTOGRAMS[name]}_{part}{window}))"
    for metric in ACCEPT_LENGTH_METRICS:
        asked[metric] = f"avg by (model,dynamo_namespace)(avg_over_time({metric}{window}))"
    return asked


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
        told = [one.value for one in _chosen(answers.get(metric, ()), model, namespace)]
        if told:
            return sum(told) / len(told)
    return Missing("Prometheus has no metric of speculation")


def _chosen(series: Iterable[Series], model: str | None, namespace: str) -> list[Series]:
    return [one for one in series if math.isfinite(one.value) and _is_ours(one.labels, model, namespace)]


def _is_ours(labels: Mapping[str, str], model: str | None, namespace: str) -> bool:
    """Labels that are not there are no objection: our Frontend has no namespace, an engine may have no model."""
    told, where = labels.get("model", ""), labels.get("dynamo_namespace", "")
    of_model = model is None or not told or told.lower() == model.lower()
    return of_model and where.replace("-", "_") in ("", namespace.replace("-", "_"))


def _total(series: Iterable[Series], model: str | None, namespace: str) -> float | None:
    """None where there is no series of ours."""
    values = [one.value for one in _chosen(series, model, namespace)]
    return sum(values) if values else None
