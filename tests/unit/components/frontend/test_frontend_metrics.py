"""`/metrics` as Prometheus reads it: Dynamo's names, labels and meaning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_local import errors
from dynamo_local.components.http_metrics import HttpMetrics, log_buckets
from tests.fakes.data_plane.processor import FakeEndpoint, answer, last, prompt, text

Make = Callable[..., Any]
CHAT = {"model": "sim-Model", "messages": [{"role": "user", "content": "Hi"}]}
CHAT_URL = "/v1/chat/completions"
MODEL = "sim-model"
"""The label is in lower case, as Dynamo's."""


class Scrape:
    """One exposition, parsed."""

    def __init__(self, exposition: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(exposition)}

    def value(self, sample: str, **labels: str) -> float | None:
        """The sample with exactly these labels; None if there is none."""
        for family in self.families.values():
            for found in family.samples:
                if found.name == sample and found.labels == labels:
                    return found.value
        return None

    def of_model(self, suffix: str) -> float | None:
        """`dynamo_frontend_<suffix>{model=…}`"""
        return self.value(f"dynamo_frontend_{suffix}", model=MODEL)

    def requests(self, status: str, kind: str = "unary", endpoint: str = "chat_completions", model: str = MODEL) -> Any:
        """`dynamo_frontend_requests_total` for these labels."""
        labels = {"model": model, "endpoint": endpoint, "request_type": kind, "status": status}
        return self.value("dynamo_frontend_requests_total", **labels)


def scrape(made: Any) -> Scrape:
    """What /metrics would say now."""
    return Scrape(made.deps.metrics.exposition().decode())


async def test_the_exposition_has_dynamos_names(house: Make):
    """The planner's queries and Dynamo's dashboards find them."""
    made = house()
    async with made.client() as client:
        await client.post(CHAT_URL, json=CHAT)
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = Scrape(response.text).families
    assert {name: family.type for name, family in families.items()} == {
        "dynamo_frontend_requests": "counter",
        "dynamo_frontend_requests_started": "counter",
        "dynamo_frontend_inflight_requests": "gauge",
        "dynamo_frontend_queued_requests": "gauge",
        "dynamo_frontend_disconnected_clients": "gauge",
        "dynamo_frontend_output_tokens": "counter",
        "dynamo_frontend_time_to_first_token_seconds": "histogram",
        "dynamo_frontend_inter_token_latency_seconds": "histogram",
        "dynamo_frontend_input_sequence_tokens": "histogram",
        "dynamo_frontend_output_sequence_tokens": "histogram",
        "dynamo_frontend_cached_tokens": "histogram",
        "dynamo_frontend_model_migration": "counter",
        "dynamo_frontend_request_duration_seconds": "histogram",
    }
    assert "_created" not in response.text


async def test_a_request_that_a_router_placed_counts_under_dynamos_router_names(house: Make):
    script = [[{**prompt(40), "kv_hit_rate": 0.25}], *([text(piece)] for piece in "abc"), [last(prompt_tokens=40)]]
    made = house(FakeEndpoint(script))
    async with made.client() as client:
        await client.post(CHAT_URL, json=CHAT)
    found, name = scrape(made), "dynamo_component_router"
    assert found.value("dynamo_component_router_kv_hit_rate_sum", model=MODEL) == 0.25
    for counted, value in (("requests", 1), ("requests_started", 1)):
        assert found.value(f"{name}_{counted}_total", model=MODEL) == value
    counts = {"time_to_first_token_seconds": 1, "request_duration_seconds": 1, "inter_token_latency_seconds": 2}
    for histogram, count in counts.items():
        assert found.value(f"{name}_{histogram}_count", model=MODEL) == count
    for histogram, total in (("input_sequence_tokens", 40), ("output_sequence_tokens", 3)):
        assert found.value(f"{name}_{histogram}_sum", model=MODEL) == total
    told = made.deps.metrics.counters()
    assert (told["hit_rate_sum"], told["hit_rate_count"]) == (0.25, 1.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_measured(house: Make, stream: bool):
    made = house(FakeEndpoint(answer("a", "b", "c", prompt_tokens=70)))
    async with made.client() as client:
        await client.post(CHAT_URL, json={**CHAT, "stream": stream})
    seen = scrape(made)
    assert seen.requests("success", "stream" if stream else "unary") == 1
    assert (seen.of_model("time_to_first_token_seconds_count"), seen.of_model("request_duration_seconds_count")) == (
        1,
        1,
    )
    assert seen.of_model("inter_token_latency_seconds_count") == 2
    assert (seen.of_model("input_sequence_tokens_count"), seen.of_model("input_sequence_tokens_sum")) == (1, 70)
    assert (seen.of_model("output_sequence_tokens_count"), seen.of_model("output_sequence_tokens_sum")) == (1, 3)
    assert seen.of_model("output_tokens_total") == 3
    assert (seen.of_model("inflight_requests"), seen.of_model("queued_requests")) == (0, 0)


def test_a_planner_is_told_the_sums_over_all_models():
    metrics = HttpMetrics()
    assert set(metrics.counters().values()) == {0.0}
    for model, tokens in (("a", 4), ("b", 2)):
        observer = metrics.begin(model, "completions", "unary", 1.0)
        observer.on_prompt(100)
        observer.on_tokens(1, 1.5)
        observer.on_tokens(tokens - 1, 2.0)
        observer.on_cached(25)
    observer.end("success", 3.0)
    told = metrics.counters()
    assert {name: told[name] for name in ("requests", "ttft_s_sum", "ttft_s_count", "isl_sum", "cached_sum")} == {
        "requests": 2.0,
        "ttft_s_sum": 1.0,
        "ttft_s_count": 2.0,
        "isl_sum": 200.0,
        "cached_sum": 25.0,
    }
    assert (told["osl_sum"], told["osl_count"], told["itl_s_count"], told["duration_s_sum"]) == (2.0, 1.0, 4.0, 2.0)


async def test_completions_count_apart(house: Make):
    made = house()
    async with made.client() as client:
        await client.post("/v1/completions", json={"model": "sim-Model", "prompt": "Hi"})
    assert scrape(made).requests("success", endpoint="completions") == 1


async def test_queued_until_the_first_token_and_in_flight_until_the_end(house: Make):
    first, second = asyncio.Event(), asyncio.Event()
    made = house(FakeEndpoint([[prompt()], first, [text("a")], second, [last()]]))
    async with made.client() as client, asyncio.timeout(5):
        running = asyncio.create_task(client.post(CHAT_URL, json=CHAT))
        await made.endpoint.called.wait()
        seen = scrape(made)
        assert (seen.of_model("inflight_requests"), seen.of_model("queued_requests")) == (1, 1)
        assert seen.of_model("requests_started_total") == 1
        first.set()
        while scrape(made).of_model("queued_requests") != 0:
            await asyncio.sleep(0)
        assert scrape(made).of_model("inflight_requests") == 1
        second.set()
        await running
    assert scrape(made).of_model("inflight_requests") == 0


@pytest.mark.parametrize("script", [errors.NoWorkers("none"), [[prompt()], errors.EngineError("broken")]])
async def test_a_failed_request_counts_as_an_error(house: Make, script: Any):
    """Without a token it has no TTFT, no ISL and no OSL, rather than zeros."""
    made = house(FakeEndpoint(script))
    async with made.client() as client:
        await client.post(CHAT_URL, json=CHAT)
    seen = scrape(made)
    assert (seen.requests("error"), seen.requests("success")) == (1, None)
    for name in ("time_to_first_token_seconds", "input_sequence_tokens", "output_sequence_tokens"):
        assert seen.of_model(f"{name}_count") == 0
    assert (seen.of_model("inflight_requests"), seen.of_model("queued_requests")) == (0, 0)


async def test_refused_requests_count_without_inventing_models(house: Make):
    made = house(max_inflight=1)
    async with made.client() as client:
        for n in range(3):
            await client.post(CHAT_URL, json={**CHAT, "model": f"made-up-{n}"})
        await client.post(CHAT_URL, json={**CHAT, "n": 0})
        with made.deps.activity.serving():
            await client.post(CHAT_URL, json={**CHAT, "stream": True})
    seen = scrape(made)
    assert seen.requests("error", model="unknown") == 4
    assert seen.requests("error", "stream") == 1
    assert "made-up" not in made.deps.metrics.exposition().decode()


def test_tokens_that_come_together_share_their_latency():
    metrics = HttpMetrics()
    observer = metrics.begin("M", "chat_completions", "stream", 10.0)
    observer.on_prompt(5)
    observer.on_prompt(5)
    observer.on_tokens(4, 10.5)
    observer.on_tokens(0, 10.6)
    observer.on_tokens(3, 10.8)
    observer.on_cached(2)
    observer.end("success", 11.0)
    observer.end("error", 99.0)
    seen = Scrape(metrics.exposition().decode())

    def of(suffix: str) -> float | None:
        return seen.value(f"dynamo_frontend_{suffix}", model="m")

    assert of("time_to_first_token_seconds_sum") == 0.5
    assert of("inter_token_latency_seconds_count") == 3
    assert of("inter_token_latency_seconds_sum") == pytest.approx(0.3)
    assert (of("input_sequence_tokens_count"), of("output_sequence_tokens_sum")) == (1, 7)
    assert (of("request_duration_seconds_sum"), of("cached_tokens_sum")) == (1.0, 2)
    assert seen.requests("error", "stream", model="m") is None


def test_tokens_that_nobody_saw_are_left_out_of_lengths_and_gaps():
    """A whole answer is generated once more after its worker was lost."""
    metrics = HttpMetrics()
    observer = metrics.begin("m", "completions", "unary", 0.0)
    observer.on_tokens(50, 1.0)
    observer.begins_anew()
    observer.on_tokens(1, 60.0)
    observer.on_tokens(59, 61.0)
    observer.on_cached(64)
    observer.on_cached(16)
    observer.end("success", 61.0)
    seen = Scrape(metrics.exposition().decode())

    def of(suffix: str) -> float | None:
        return seen.value(f"dynamo_frontend_{suffix}", model="m")

    assert (of("output_tokens_total"), of("output_sequence_tokens_sum")) == (110, 60)
    assert (of("inter_token_latency_seconds_count"), of("inter_token_latency_seconds_sum")) == (59, 1.0)
    assert (of("time_to_first_token_seconds_count"), of("queued_requests")) == (1, 0)
    assert (of("cached_tokens_count"), of("cached_tokens_sum")) == (1, 64)


def test_a_prompts_length_that_comes_late_is_still_recorded():
    metrics = HttpMetrics()
    observer = metrics.begin("m", "completions", "unary", 0.0)
    observer.on_tokens(1, 1.0)
    observer.on_prompt(9)
    observer.end("success", 2.0)
    assert Scrape(metrics.exposition().decode()).value("dynamo_frontend_input_sequence_tokens_sum", model="m") == 9


def test_the_bucket_bounds_are_dynamos():
    assert log_buckets(1.0, 256.0, 10) == [0.0, 1.9, 3.4, 6.3, 12.0, 22.0, 40.0, 75.0, 140.0, 260.0]
    assert log_buckets(0.001, 480.0, 18)[-1] == 480.0
    assert len(log_buckets(50.0, 128000.0, 12)) == 12


def test_requests_are_remembered_one_by_one_with_their_own_lengths():
    metrics = HttpMetrics()
    for isl, tokens, status in ((100, 5, "success"), (7, 1, "success"), (9, 3, "error")):
        observer = metrics.begin("m", "completions", "stream", 10.0)
        observer.on_prompt(isl)
        observer.on_tokens(1, 10.5)
        observer.on_tokens(tokens - 1, 10.9)
        observer.end(status, 11.0)
    told = metrics.recent.of(5.0, 12.0)
    assert told is not None
    assert told.began_s == (2.0, 2.0, 2.0)
    assert [(each.isl, each.osl, each.ttft_s) for each in told.answered] == [(100, 5, 0.5), (7, 1, 0.5)]
    assert told.answered[0].itl_s == pytest.approx(0.1)
    assert told.answered[1].itl_s is None
    served = metrics.served.counters()
    assert (served["requests"], served["tokens"]) == (3, 9)
    assert {name.partition(".")[0]: count for name, count in served.items() if "." in name} == {"ttft": 3, "itl": 2}
