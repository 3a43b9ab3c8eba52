"""Several models behind one Frontend: a request goes to the Processor of the model that it names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from dynamo_local.components.messages import ApiRequest
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai import errors as api_errors
from dynamo_local.ports import EndpointClient, Instance, ResponseStream


class _Known(msgspec.Struct):
    model: Any = None


_decoder: Final = msgspec.json.Decoder(_Known)


class EndpointByModel:
    """An `EndpointClient` over one endpoint of several Processors.

    `clients`: component -> the Processor's client, for each Processor and for the workers behind it. A model's card
    names its worker's component, an adapter's card its Processor's.
    """

    def __init__(self, clients: Mapping[str, EndpointClient], models: ModelsView, adapters: ModelsView) -> None:
        self._clients = clients
        self._models = models
        self._adapters = adapters
        self._first = next(iter(clients.values()))
        self._last: dict[str, EndpointClient] = {}

    def instances(self) -> tuple[Instance, ...]:
        return self._first.instances()

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        return await self._first.wait_for_instances(timeout_s)

    async def wait_for_others(self, than: Collection[int], timeout_s: float) -> tuple[Instance, ...]:
        return await self._first.wait_for_others(than, timeout_s)

    async def call(
        self,
        payload: Any,
        *,
        instance_id: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> ResponseStream:
        """As `EndpointClient.call`. Raises `ApiError` 404 for a model that nobody serves."""
        client = self._client_for(model_of(payload))
        return await client.call(payload, instance_id=instance_id, request_id=request_id, timeout_s=timeout_s)

    def _client_for(self, name: str | None) -> EndpointClient:
        if name is None:  # vLLM's API then says what is missing
            return self._first
        served = self._models.get(name) or self._adapters.get(name)
        for component in () if served is None else served.components:
            if (client := self._clients.get(component)) is not None:
                self._last[name] = client
                return client
        if name in self._last:  # its Processor waits for another worker, if the request's own was lost
            return self._last[name]
        raise api_errors.no_model(self._models, name)


def model_of(payload: Any) -> str | None:
    """The model that a message to a Processor names."""
    if isinstance(payload, ApiRequest):
        try:
            name = _decoder.decode(payload.body).model
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
    else:
        name = payload.get("model") or payload.get("request", {}).get("model")
    return name if isinstance(name, str) else None
