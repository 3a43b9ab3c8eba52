"""Traffic from a real Prometheus that scrapes a Frontend's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_local.arbiter.exporter import metrics_app
from dynamo_local.clock import AsyncioClock
from dynamo_local.components.http_metrics import HttpMetrics
from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.core.types import Missing
from dynamo_local.planner.prometheus import PrometheusOptions, PrometheusTraffic
from dynamo_local.planner.values import Traffic
from tests.drivers.prometheus import RealPrometheus, find_prometheus
from tests.tools.certificates import self_signed

pytestmark = [pytest.mark.infra, pytest.mark.timeout(150)]

WITHIN_S = 60.0
ISL, OSL, TTFT_S, DURATION_S = 200, 11, 0.25, 1.25


@dataclass
class Scraped:
    """A Frontend's metrics, and the Prometheus that scrapes them."""

    metrics: HttpMetrics
    server: RealPrometheus

    def requests(self, count: int, model: str = "Tiny") -> None:
        for _ in range(count):
            observer = self.metrics.begin(model, "chat_completions", "stream", 0.0)
            observer.on_prompt(ISL)
            observer.on_tokens(1, TTFT_S)
            observer.on_tokens(OSL - 1, DURATION_S)
            observer.end("success", DURATION_S)

    async def until(self, holds: Callable[[Traffic | Missing], bool], **options: object) -> Traffic | Missing:
        source = PrometheusTraffic(PrometheusOptions(self.server.url, **options), AsyncioClock())  # type: ignore[arg-type]
        last: Traffic | Missing = Missing("not asked")
        try:
            async with asyncio.timeout(WITHIN_S):
                while not holds(last):
                    await asyncio.sleep(0.2)
                    last = await source.traffic(10.0)
        except TimeoutError:
            raise AssertionError(f"{last}\n{self.server.log[-2000:]}") from None
        finally:
            await source.close()
        return last


@pytest.fixture
async def scraped(tmp_path: Path) -> AsyncIterator[Scraped]:
    find_prometheus()  # before anything is begun that would have to be ended
    metrics = HttpMetrics()
    page = HttpServer(metrics_app(metrics.exposition), bind_socket("127.0.0.1", 0, option="the test's"))
    await page.start()
    server = RealPrometheus(tmp_path, page.url.removeprefix("http://"))
    await asyncio.to_thread(server.start)
    yield Scraped(metrics, server)
    await asyncio.to_thread(server.stop)
    await page.stop()


def counted(traffic: Traffic | Missing) -> bool:
    return isinstance(traffic, Traffic) and isinstance(traffic.num_req, float) and traffic.num_req > 0


def silent(traffic: Traffic | Missing) -> bool:
    return isinstance(traffic, Traffic) and traffic.num_req == 0.0


def unknown(why: str) -> Callable[[Traffic | Missing], bool]:
    return lambda traffic: isinstance(traffic, Missing) and why in traffic.reason


@pytest.mark.full
async def test_a_window_has_the_means_of_what_was_served(scraped: Scraped) -> None:
    await scraped.until(unknown("Prometheus has"))
    scraped.requests(1)  # a series begins with its first request: what came before its first scrape is in no increase
    await scraped.until(silent, model="TINY")
    scraped.requests(20)
    traffic = await scraped.until(counted, model="tiny")
    assert isinstance(traffic, Traffic)
    assert traffic.isl == pytest.approx(ISL)
    assert traffic.osl == pytest.approx(OSL)
    assert traffic.ttft_ms == pytest.approx(TTFT_S * 1000)
    assert traffic.itl_ms == pytest.approx((DURATION_S - TTFT_S) * 1000 / (OSL - 1))
    assert traffic.request_duration_s == pytest.approx(DURATION_S)
    assert isinstance(traffic.kv_hit_rate, Missing)
    assert isinstance(traffic.accept_length, Missing)
    assert isinstance(traffic.num_req, float)
    assert 10 < traffic.num_req < 40
    await scraped.until(unknown("Prometheus has"), model="other")
    await scraped.until(silent, model="tiny")


async def test_a_frontend_that_is_gone_is_unknown_not_silent(scraped: Scraped, tmp_path: Path) -> None:
    scraped.requests(1)
    await scraped.until(silent)
    (tmp_path / "gone").mkdir()
    gone = RealPrometheus(tmp_path / "gone", "127.0.0.1:1")
    await asyncio.to_thread(gone.start)
    try:
        await Scraped(scraped.metrics, gone).until(unknown("Prometheus has"))
    finally:
        await asyncio.to_thread(gone.stop)


async def test_over_https_its_certificate_is_checked(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    server = RealPrometheus(
        tmp_path, "127.0.0.1:1", web_config=f"tls_server_config:\n  cert_file: {cert}\n  key_file: {key}\n"
    )
    await asyncio.to_thread(server.start)
    try:
        scraped = Scraped(HttpMetrics(), server)
        await scraped.until(unknown("Prometheus has"), ca_bundle=cert)
        await scraped.until(unknown("Prometheus has"), ssl_verify=False)
        await scraped.until(unknown("cannot be asked"))
    finally:
        await asyncio.to_thread(server.stop)
