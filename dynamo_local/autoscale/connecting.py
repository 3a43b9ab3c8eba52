"""What carries a planner's decisions out in another environment: a connector on this run's etcd."""

from __future__ import annotations

from dynamo_local.autoscale.arbiter_world import ArbiterWorld
from dynamo_local.clock import Clock
from dynamo_local.config import PlannerConfig, planned_components
from dynamo_local.control.links import Links
from dynamo_local.core.notes import Tell
from dynamo_local.core.types import GraphSpec
from dynamo_local.core.virtual import Layout
from dynamo_local.planner.connectors.virtual_connector import VirtualConnector
from dynamo_local.planner.connectors.virtual_keys import VirtualKeys


async def connected_virtually(
    options: PlannerConfig, graph: GraphSpec, world: ArbiterWorld, *, links: Links, clock: Clock, tell: Tell
) -> VirtualConnector:
    """It follows the keys from now on; `world` says from now on whether a decision waits. Raises `EtcdUnavailable`."""
    prefill, decode = planned_components(graph)
    virtual = VirtualConnector(
        VirtualKeys(links.kv, graph.namespace, Layout(options.virtual_keys)),
        clock,
        prefill=prefill,
        decode=decode,
        counts=lambda: {pool.component: pool.capacity for pool in world.worker_pools().all},
        max_wait_s=options.virtual_max_wait,
        blocking=options.virtual_blocking,
        tell=tell,
    )
    await virtual.start()
    world.pending = virtual.pending
    return virtual
