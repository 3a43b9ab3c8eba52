"""What the twin's fleet is made of, and the workers that there are when a run begins."""

from __future__ import annotations

from dataclasses import replace

from dynamo_local.core.gpu_residue import Sleeper
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.life.fleet import Fleet, Process, Template, Worker
from dynamo_local.core.life.standby import Standby
from dynamo_local.core.types import Role, WorkerState, lease_hex, watcher_name
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.twin.options import DECODE, GPU_MEMORY_BYTES, LONG_AGO_S, NAMESPACE, PREFILL, TwinOptions


def templates_of(options: TwinOptions) -> tuple[Template, ...]:
    """Prefill, where there is any, and decode."""
    flips, standby = options.flips and bool(options.shape.prefill), options.standby
    decode = Template(
        DECODE,
        options.decode_role,
        options.decode_gpus,
        start_deadline_s=2 * options.lead.cold_s + 60.0,
        drain_deadline_s=options.drain_deadline_s,
        flips_to=PREFILL if flips else None,
        standby=None if standby is None else standby.decode,
    )
    if not options.shape.prefill:
        return (decode,)
    prefill = replace(
        decode,
        component=PREFILL,
        role=Role.PREFILL,
        gpus_per_worker=options.prefill_gpus,
        flips_to=DECODE if flips else None,
        standby=None if standby is None else standby.prefill,
    )
    return (prefill, decode)


def devices_of(options: TwinOptions) -> tuple[GpuDevice, ...]:
    """Those of the host, on which nobody else is."""
    return tuple(
        GpuDevice(
            index, f"GPU-twin-{index}", "twin", memory_total_bytes=GPU_MEMORY_BYTES, memory_used_bytes=0, processes=()
        )
        for index in range(options.gpus)
    )


def with_ready(fleet: Fleet, template: Template, n: int, number: int) -> Fleet:
    """One more that serves, as process `number`."""
    name = watcher_name(NAMESPACE, template.component, n)
    ledger = fleet.gpus.allocate(name, template.gpus_per_worker)
    worker = Worker(
        name,
        template.component,
        template.role,
        n,
        WorkerState.READY,
        since_s=LONG_AGO_S,
        gpus=ledger.held_uuids.get(name, ()),
        served=True,
        starts=1,
        process=Process(number, None, LONG_AGO_S, None),
        lease=lease_hex(number),
    )
    return replace(fleet, workers={**fleet.workers, name: worker}, gpus=ledger)


def with_sleeping(fleet: Fleet, template: Template, n: int, number: int, sim: SimOptions) -> Fleet:
    """One more that sleeps, and keeps what the engine's options say."""
    name = watcher_name(NAMESPACE, template.component, n)
    fleet = with_ready(fleet, template, n, number)
    worker = fleet.workers[name]
    sleeper = Sleeper(worker.gpus, sim.sleep_residue_bytes, sim.sleep_host_bytes)
    asleep = replace(worker, state=WorkerState.SLEEPING, gpus=(), standby=Standby(wanted=True))
    return replace(fleet, workers={**fleet.workers, name: asleep}, gpus=fleet.gpus.fall_asleep(name, sleeper))
