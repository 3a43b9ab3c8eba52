"""The metrics of several Frontends as one page."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dynamo_local.components.http_metrics import HttpMetrics
from dynamo_local.components.openai import port as counts


def served(requests: int, *, open_ones: int = 0, model: str = "m") -> HttpMetrics:
    """The metrics of a Frontend that has answered so many requests of three tokens, and has others in hand."""
    metrics = HttpMetrics()
    for number in range(requests + open_ones):
        observer = metrics.begin(model, "completions", "stream", 0.0)
        observer.on_prompt(10)
        observer.on_tokens(1, 0.5)
        observer.on_tokens(2, 0.7)
        if number < requests:
            observer.end("success", 1.0)
    return metrics


def samples(page: bytes) -> dict[str, float]:
    """Of one model and one kind of request: the values by name, buckets apart."""
    families = text_string_to_metric_families(page.decode())
    return {sample.name + sample.labels.get("le", ""): sample.value for family in families for sample in family.samples}


def test_the_sum_of_pages_is_the_page_of_all_requests():
    two = counts.added(counts.counts_of(metrics.registry) for metrics in (served(3, open_ones=1), served(4)))
    assert samples(counts.page(two)) == samples(served(7, open_ones=1).exposition())
    assert counts.page(counts.counts_of(served(2).registry)) == served(2).exposition()


def test_what_is_now_ends_with_its_process_and_what_was_does_not():
    left = counts.counts_of_ended(counts.counts_of(served(3, open_ones=2).registry))
    found = samples(counts.page(counts.added((left, counts.counts_of(served(1, open_ones=1).registry)))))
    assert found["dynamo_frontend_inflight_requests"] == 1.0
    assert found["dynamo_frontend_requests_started_total"] == 7.0
    assert found["dynamo_frontend_output_tokens_total"] == 21.0


def test_counts_come_back_from_a_file_as_they_were():
    told = counts.counts_of(served(2).registry)
    assert msgspec.json.decode(msgspec.json.encode(told), type=counts.Counts) == told
    assert msgspec.convert(msgspec.to_builtins(told), counts.Counts) == told
