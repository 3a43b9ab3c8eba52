"""A component serves endpoints that its class does not declare, each with the model of its own requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from dynamo_local.components.measurement import MEASURE, MeasureRequest
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.sdk.context import current_context
from dynamo_local.worker import registration as endpoints


class _Server:
    """Shows what an `EndpointServer` is made with."""

    def __init__(self, nats: Any, *, subject: str, handler: Any, name: str, decode: Any) -> None:
        self.name, self.subject, self.handler, self.decode = name, subject, handler, decode

    async def start(self) -> None:
        """Nothing listens."""

    async def close(self) -> None:
        """Nothing did."""


async def test_an_added_endpoint_is_registered_and_reads_its_own_requests(monkeypatch):
    """As `measure` of a worker that can be measured; the declared ones keep theirs, and so does the load."""
    monkeypatch.setattr(endpoints, "EndpointServer", _Server)
    more = {MEASURE: (lambda request: request, MeasureRequest)}
    context: Any = SimpleNamespace(
        nats=None, lease_id=5, load_source=object(), more_endpoints=more, close_with_worker=lambda close: None
    )
    component = SimpleNamespace(status=None, canary=None)
    identity: Any = SimpleNamespace(namespace="dynamo", component="PrefillWorker")
    served = endpoints.Endpoints(identity)
    await served.serve(context, PrefillWorker, component, lambda: None)  # type: ignore[arg-type]
    assert [key.rpartition("/")[2] for key in served.keys(5)] == ["status:5", "canary:5", "load_metrics:5", "measure:5"]
    by_name = {server.name: server for _component, server in served._served}
    asked = MeasureRequest(prompts=1, tokens=10, seed=3)
    assert by_name[MEASURE].decode(msgspec.msgpack.encode(asked)) == asked
    assert by_name["load_metrics"].decode(b"whatever") is None


async def test_a_colocated_component_is_served_on_nats_and_registered_under_its_hosts_lease(monkeypatch):
    monkeypatch.setattr(endpoints, "EndpointServer", _Server)
    context: Any = SimpleNamespace(nats=None, lease_id=5, close_with_worker=lambda close: None)
    component = SimpleNamespace(status=lambda request: current_context(), canary=None)
    host: Any = SimpleNamespace(namespace="dynamo", component="Frontend")
    served = endpoints.Endpoints(host)
    await served.serve_colocated(context, PrefillWorker, component)  # type: ignore[arg-type]
    assert served.keys(5) == ["dynamo/components/PrefillWorker/status:5", "dynamo/components/PrefillWorker/canary:5"]
    [key, value] = served.registrations()[0]
    assert key(6) == "dynamo/components/PrefillWorker/status:6"
    assert b"PrefillWorker" in value(6)
    [_, server] = served._served[0]
    assert server.handler(None, None) is context, "its code runs in its own context, not in its host's"  # type: ignore[attr-defined]
