"""The graphs that ship: `dynamo_local.components.graphs:agg`, `…:disagg_router`, or several models behind one port.

    agg                 Frontend, Processor, VllmWorker
    agg_router          the same with a Router, which sends a prompt where most of it is cached
    disagg              Frontend, Processor, VllmWorker, PrefillWorker
    disagg_router       the same with a Router
    models__a__b        several models, each with workers and a Processor: a and a_Processor, b and …
    models__a__a_Router__b      the same; the first one has a Router
    models__a__a_PrefillWorker__b      the same; the first one has prefill workers

A graph is linked when its name is first asked for: each load of a graph sees its own links only.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.components.processor import Processor
from dynamo_local.components.router import Router
from dynamo_local.components.vllm_worker import VllmWorker
from dynamo_local.config.models import GRAPHS, SEPARATOR, prefill_of, processor_of, router_of
from dynamo_local.sdk.service import DynamoService, depends

Service = DynamoService[Any]

# For type checkers a decorated class is still the class.
_FRONTEND, _PROCESSOR, _ROUTER = (cast(Service, each) for each in (Frontend, Processor, Router))
_WORKER, _PREFILL = (cast(Service, each) for each in (VllmWorker, PrefillWorker))
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
    first, *components = name.split(SEPARATOR)
    if first != "models" or not components or not all(components) or len(set(components)) < len(components):
        raise AttributeError(f"module {GRAPHS!r} has no graph {name!r}")
    frontend, chains = _models(tuple(components))
    for processor, *others in chains:
        last = frontend.link(processor, colocate=True)
        for each in others:
            last = last.link(each)
    return frontend


@cache
def _models(components: tuple[str, ...]) -> tuple[Service, tuple[tuple[Service, ...], ...]]:
    """A Frontend that depends on a Processor of each model, and these with their Routers and workers."""
    others = {of(component) for component in components for of in (router_of, prefill_of)} & set(components)
    chains = []
    for component in components:
        if component in others:
            continue
        apart: tuple[Service, ...] = ()
        helped: dict[str, Any] = {}
        if prefill_of(component) in others:
            apart = (_like(_PREFILL, prefill_of(component), {}),)
            helped["prefill_worker"] = depends(apart[0], optional=True)
        worker = _like(_WORKER, component, helped)
        client = depends(worker, optional=True)  # it starts without a worker, which may come later
        members: dict[str, Any] = {"worker": client}
        routed: tuple[Service, ...] = ()
        if router_of(component) in others:
            routed = (_like(_ROUTER, router_of(component), {"worker": client}),)
            members["router"] = depends(routed[0])
        chains.append((_like(_PROCESSOR, processor_of(component), members), *routed, worker, *apart))
    clients = {chain[0].name: depends(chain[0]) for chain in chains}
    return _like(_FRONTEND, _FRONTEND.name, {"processor": None, **clients}), tuple(chains)


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
