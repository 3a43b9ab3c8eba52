"""Options of the policies that aim at latencies: who is asked for the traffic. Names are Dynamo 1.6.1's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, model_validator

from dynamo_local.config.planner.kinds import OPTIONS, Seconds


def _address(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ValueError("must be the address of a Prometheus server: http://HOST:PORT, perhaps with a path")
    if parts.username or parts.password:
        raise ValueError("must not contain credentials; put a token into a file, and give its path")
    return text


class MeasuringFields(BaseModel):
    """Where the traffic is measured, if not by the graph's own frontends."""

    model_config = OPTIONS

    metric_pulling_prometheus_endpoint: Annotated[str, AfterValidator(_address)] | None = None
    """Address of a Prometheus server, `http://HOST:PORT`, that is asked for the traffic; by default the frontends."""
    metric_pulling_prometheus_token_file: Path | None = None
    """File with the token for it, read for each request."""
    metric_pulling_prometheus_ca_bundle: Path | None = None
    """File of certificates by which it is trusted; by default the system's."""
    metric_pulling_prometheus_ssl_verify: bool = True
    """Whether its certificate is checked at all."""
    metric_pulling_prometheus_extra_query_params: dict[str, str] = Field(default_factory=dict)
    """More parameters of each query."""
    metric_pulling_prometheus_request_timeout_seconds: Seconds = 10.0
    """Seconds for one query; all of a window have 4.5 s together."""

    @model_validator(mode="after")
    def _measured_somewhere(self) -> Self:
        source = getattr(self, "throughput_metrics_source", "frontend")
        if source == "router" and self.metric_pulling_prometheus_endpoint is None:
            raise ValueError(
                "throughput_metrics_source is router, whose metrics only a Prometheus server has: give its address as "
                "metric_pulling_prometheus_endpoint"
            )
        return self
