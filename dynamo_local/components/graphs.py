"""The graphs that ship: `dynamo_local.components.graphs:agg`, `…:disagg_router`, or several models behind one port.

    agg                 Frontend, Processor, VllmWorker
    agg_router          the same with a Router, which sends a prompt where most of it is cached
    disagg              Frontend, Processor, VllmWorker, PrefillWorker
    disagg_router       the same with a Router
    models_2            two aggregated models: Processor and VllmWorker, Processor2 and VllmWorker2 (up to models_16)

A graph is linked when its name is first asked for: each load of a graph sees its own links only.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, cast

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.components.processor import Processor
from dynamo_local.components.router import Router
from dynamo_local.components.vllm_worker import VllmWorker
from dynamo_local.config.model_graph import GRAPHS, numbered
from dynamo_local.sdk.service import DynamoService, depends

MODELS_MAX = 16
_MODELS = re.compile(r"models_([0-9]{1,2})")

Service = DynamoService[Any]

# For type checkers a decorated class is still the class.
_FRONTEND, _PROCESSOR, _WORKER = (cast(Service, each) for each in (Frontend, Processor, VllmWorker))
_WORKERS: dict[str, tuple[Any, ...]] = {
    "agg": (VllmWorker,),
    "agg_router": (Router, VllmWorker),
    "disagg": (VllmWorker, PrefillWorker),
    "disagg_router": (Router, VllmWorker, PrefillWorker),
}


def __getattr__(name: str) -> Any:
    if (workers := _WORKERS.get(name)) is not None:
        last = _FRONTEND.link(_PROCESSOR, colocate=True)
        for each in workers:
            last = last.link(each)
        return _FRONTEND
    match = _MODELS.fullmatch(name)
    if match is None or not 2 <= int(match[1]) <= MODELS_MAX:
        raise AttributeError(f"module {GRAPHS!r} has no graph {name!r}")
    frontend, pairs = _models(int(match[1]))
    for processor, worker in pairs:
        frontend.link(processor).link(worker)
    return frontend


@cache
def _models(count: int) -> tuple[Service, tuple[tuple[Service, Service], ...]]:
    """A Frontend that depends on a Processor of each model, and these with their workers."""
    pairs = [(_PROCESSOR, _WORKER)]
    for at in range(1, count):
        worker = _like(_WORKER, numbered(_WORKER.name, at), {})
        pairs.append((_like(_PROCESSOR, numbered(_PROCESSOR.name, at), {"worker": depends(worker)}), worker))
    more = {f"processor_{at + 1}": depends(processor) for at, (processor, _) in enumerate(pairs) if at}
    return _like(_FRONTEND, _FRONTEND.name, more), tuple(pairs)


def _like(service: Service, name: str, members: dict[str, Any]) -> Service:
    """A service of the same kind under another name, with these attributes replaced or added."""
    inner = type(name, (service.inner,), {"__doc__": service.inner.__doc__, **members})
    return DynamoService(
        inner,
        name=name,
        dynamo={"namespace": service.namespace, "role": str(service.role)},
        resources={"gpu": service.resources.gpu},
        config=service.config_model,
    )
