"""The GPU ledger: the holder of each device. Whole devices only, never two holders, never a device that is not there.

Every device is in exactly one of four places:

* *held* by a worker of ours, until that worker's **process** is gone (losing a lease frees nothing);
* *quarantined*: its memory did not come back after its worker was gone; until it is seen to be empty after all;
* *taken*: a stranger's process or memory is on it, another namespace reserved it, or it vanished from the host;
* *free*.

A device has at most one awake holder, and any number of workers that sleep on it (`Sleeper`). Sleepers keep a measured
residue, and the awake holder must fit beside them.

Indices come from the devices that were seen, and from nowhere else. `gpu` counts devices per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Literal

from dynamo_local.core.types import Missing
from dynamo_local.errors import GpuError

# --- topology
# Which GPUs belong together: the best-connected set of a given size.
#
# Scores order links, they are no bandwidths. NVLink beats every PCIe path; among PCIe paths the common ancestor
# decides (the order of NVML's `nvmlGpuTopologyLevel_t`, printed by `nvidia-smi topo -m` as PIX, PXB, PHB, NODE, SYS).

LINK_UNKNOWN = 0
LINK_SYSTEM = 10
"""Across CPU sockets."""
LINK_NODE = 20
"""Same NUMA node, different host bridges."""
LINK_HOSTBRIDGE = 30
LINK_MULTIPLE = 40
"""Several PCIe switches."""
LINK_SINGLE = 50
"""One PCIe switch."""
LINK_INTERNAL = 60
"""Same board."""
LINK_NVLINK = 1000
"""NVLink; the number of links is added, so that NV4 beats NV2."""

EXACT_SEARCH_MAX = 16
"""GPUs up to which every set is tried: 12,870 sets at worst (8 of 16), some 50 ms."""

Score = Callable[[int, int], int]
"""Link score of two positions; symmetric."""


def best_set(
    total: int, count: int, score: Score, allowed: Callable[[Sequence[int]], bool] | None = None
) -> tuple[int, ...]:
    """The `count` of `total` positions to hand out, ascending. Needs 0 <= count <= total.

    Only sets that are `allowed` count, if that is given; empty if none is.

    1. The strongest weakest link (an all-reduce runs at the pace of its slowest link), then the strongest sum.
    2. Best fit: the least link strength cut between the set and what remains, so that well-connected
       sets stay whole for a later, larger ask.
    3. The lowest positions: the same input always gives the same answer.

    Exact up to `EXACT_SEARCH_MAX` positions; above, one set is grown from each position and the best taken.
    """
    if not 0 <= count <= total:
        raise ValueError(f"cannot choose {count} of {total}")
    matrix = [[score(a, b) if a != b else 0 for b in range(total)] for a in range(total)]
    strength = [sum(row) for row in matrix]
    if total <= EXACT_SEARCH_MAX:
        candidates = list(combinations(range(total), count))
    else:
        candidates = sorted({_grow(seed, count, matrix) for seed in range(total)}) if count else [()]
    return min(filter(allowed, candidates), key=lambda chosen: _cost(chosen, matrix, strength), default=())


def _cost(chosen: Sequence[int], matrix: list[list[int]], strength: list[int]) -> tuple[int, int, int, Sequence[int]]:
    weakest, inside = 0, 0
    if len(chosen) > 1:
        links = [matrix[a][b] for a, b in combinations(chosen, 2)]
        weakest, inside = min(links), sum(links)
    cut = sum(strength[a] for a in chosen) - 2 * inside
    return -weakest, -inside, cut, chosen


def _grow(seed: int, count: int, matrix: list[list[int]]) -> tuple[int, ...]:
    chosen = [seed]
    while len(chosen) < count:
        rest = [i for i in range(len(matrix)) if i not in chosen]
        chosen.append(max(rest, key=lambda i: (min(matrix[i][j] for j in chosen), sum(matrix[i][j] for j in chosen))))
    return tuple(sorted(chosen))


# --- gpu_residue
# The memory that sleeping workers keep on devices which others may use meanwhile.

DEFAULT_VRAM_SHARE = 0.92
"""The part of a device's memory that an awake worker takes where nobody says otherwise: vLLM's own default."""


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A worker that sleeps: the devices that its process is pinned to, and what it keeps.

    `vram_bytes` is on each of the devices, `host_bytes` in main memory. `pids` are those of its processes.
    """

    uuids: tuple[str, ...]
    vram_bytes: int | Missing
    host_bytes: int | Missing
    pids: frozenset[int] = frozenset()


def sleepers_on(uuid: str, sleepers: Mapping[str, Sleeper], apart_from: str | None = None) -> dict[str, Sleeper]:
    """Those that are pinned to that device, by watcher name."""
    return {name: each for name, each in sleepers.items() if uuid in each.uuids and name != apart_from}


def residue_bytes(sleepers: Mapping[str, Sleeper]) -> int | Missing:
    """The bytes that they keep together on one device; missing if that of one is."""
    total = 0
    for name, sleeper in sleepers.items():
        if isinstance(sleeper.vram_bytes, Missing):
            return Missing(f"what {name} keeps was not measured: {sleeper.vram_bytes.reason}")
        total += sleeper.vram_bytes
    return total


def bytes_left(device: GpuDevice, sleepers: Mapping[str, Sleeper]) -> int | Missing:
    """The rest of the device's memory."""
    kept = residue_bytes(sleepers)
    if isinstance(kept, Missing):
        return kept
    if isinstance(device.memory_total_bytes, Missing):
        return Missing(f"the memory of GPU {device.index} is not known: {device.memory_total_bytes.reason}")
    return device.memory_total_bytes - kept


def why_too_full(device: GpuDevice, sleepers: Mapping[str, Sleeper], share: float) -> str | None:
    """Why a worker that takes this `share` of the device does not fit beside them, in numbers; None if it does."""
    if not sleepers:
        return None
    names = ", ".join(sleepers)
    left, total = bytes_left(device, sleepers), device.memory_total_bytes
    if isinstance(left, Missing) or isinstance(total, Missing):
        why = left.reason if isinstance(left, Missing) else "unknown"
        return f"GPU {device.index}: nobody knows what fits beside {names} ({why})"
    needed = share * total
    if needed <= left:
        return None
    return (
        f"GPU {device.index}: {names} sleep there and keep {gib(total - left)} of {gib(total)}; a worker takes "
        f"{gib(needed)} ({share:.0%}), {gib(left)} are left"
    )


def without_sleepers(device: GpuDevice, sleepers: Mapping[str, Sleeper]) -> GpuDevice:
    """The device as it would look if they were not there: for finding out who else is on it."""
    if not sleepers:
        return device
    ours = frozenset[int]().union(*(each.pids for each in sleepers.values()))
    kept, used, processes = residue_bytes(sleepers), device.memory_used_bytes, device.processes
    if isinstance(kept, Missing):
        used = Missing(kept.reason)
    elif not isinstance(used, Missing):
        used = max(0, used - kept)
    if not isinstance(processes, Missing):
        processes = tuple(process for process in processes if process.pid not in ours)
    return replace(device, memory_used_bytes=used, processes=processes)


def gib(size_bytes: float) -> str:
    """For a person: `1.5 GiB`."""
    return f"{size_bytes / 1024**3:.1f} GiB"


def describe_sleepers(sleepers: Mapping[str, Sleeper], index: Mapping[str, int]) -> Sequence[str]:
    """One line each, for a refusal: who sleeps where, and what it keeps. `index` is by UUID."""
    lines = []
    for name, sleeper in sleepers.items():
        where = ", ".join(f"GPU {index[uuid]}" for uuid in sleeper.uuids if uuid in index)
        kept = "an unknown amount" if isinstance(sleeper.vram_bytes, Missing) else gib(sleeper.vram_bytes)
        if where:
            lines.append(f"{name} sleeps on {where} and keeps {kept} there")
    return lines


STRANGER_MEMORY_BYTES = 512 * 1024**2
"""Memory in use above which somebody is on the device, even if no process can be seen (another container)."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a device. A graphics process (a desktop) counts by its memory only, a compute one always."""

    pid: int
    name: str
    memory_bytes: int | Missing
    kind: Literal["compute", "graphics"] = "compute"


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One physical (or simulated) GPU as it was when sampled. `links` maps a peer's UUID to a link score."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int | Missing
    memory_used_bytes: int | Missing
    processes: tuple[GpuProcess, ...] | Missing = ()
    numa_node: int | Missing = Missing("not sampled")  # noqa: RUF009 - frozen
    links: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class GpuAsk:
    """One worker's wish: `gpu` whole devices for this worker alone."""

    watcher_name: str
    service: str
    gpu: int


def link_score(a: GpuDevice, b: GpuDevice) -> int:
    """How well two devices are connected; falls back to the NUMA node where no link was reported."""
    score = max(a.links.get(b.uuid, LINK_UNKNOWN), b.links.get(a.uuid, LINK_UNKNOWN))
    if score == LINK_UNKNOWN and not isinstance(a.numa_node, Missing) and a.numa_node == b.numa_node:
        return LINK_NODE
    return score


def best_connected(
    devices: Sequence[GpuDevice], count: int, allowed: Callable[[Iterable[str]], bool] | None = None
) -> tuple[str, ...]:
    """The UUIDs of the `count` devices that are joined best: `best_set`. `allowed` takes the UUIDs of a set."""
    chosen = best_set(
        len(devices),
        count,
        lambda a, b: link_score(devices[a], devices[b]),
        allowed and (lambda positions: allowed(devices[each].uuid for each in positions)),
    )
    return tuple(devices[each].uuid for each in chosen)


SIMULATED = "GPU-sim"
"""How the UUIDs of simulated GPUs begin."""


def simulated_uuid(index: int) -> str:
    """The UUID of a simulated GPU of that index."""
    return f"{SIMULATED}00000-0000-0000-0000-{index:012d}"


def cuda_visible_devices(devices: Iterable[GpuDevice]) -> str:
    """The value that pins a worker: full UUIDs, which mean the same device under every CUDA_DEVICE_ORDER."""
    return ",".join(device.uuid for device in devices)


def occupant(device: GpuDevice, bound_bytes: int = STRANGER_MEMORY_BYTES) -> str | None:
    """The device's occupant, for a person to read; None if it is seen to be empty.

    A device of which neither the processes nor the memory can be seen is not seen to be empty.
    """
    processes = () if isinstance(device.processes, Missing) else device.processes
    used = device.memory_used_bytes
    over = not isinstance(used, Missing) and used > bound_bytes
    if over or any(process.kind == "compute" for process in processes):
        if processes:
            return ", ".join(_describe(process) for process in processes)
        return f"{_amount(used)} in use by processes that cannot be seen from here"
    if isinstance(used, Missing) and isinstance(device.processes, Missing):
        return f"nobody knows: memory {used.reason}, processes {device.processes.reason}"
    return None


def _describe(process: GpuProcess) -> str:
    return f"pid {process.pid} {process.name} ({_amount(process.memory_bytes)})"


def _amount(value: int | Missing) -> str:
    return "memory unknown" if isinstance(value, Missing) else f"{value / 1024**3:.1f} GiB"


@dataclass(frozen=True)
class GpuLedger:
    """Which device is in which of the four places, as a value: each change is a new ledger.

    `devices` are in the order of their indices. `held_uuids` is by watcher name, in the order of allocation.
    `quarantined` (with the reason) and `elsewhere` (the holder of the GPU lock outside of this namespace) are by UUID.
    `vanished` were seen once and are not seen any more. `sleepers` are by watcher name. Make one with `GpuLedger.of`.
    A method either returns the new ledger or raises `GpuError`.
    """

    devices: tuple[GpuDevice, ...] = ()
    held_uuids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quarantined: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    vanished: frozenset[str] = frozenset()
    sleepers: Mapping[str, Sleeper] = field(default_factory=dict)
    stranger_memory_bytes: int = STRANGER_MEMORY_BYTES

    @classmethod
    def of(
        cls,
        devices: Sequence[GpuDevice],
        *,
        elsewhere: Mapping[str, str] | None = None,
        stranger_memory_bytes: int = STRANGER_MEMORY_BYTES,
    ) -> GpuLedger:
        """A ledger in which nobody holds anything."""
        return cls(stranger_memory_bytes=stranger_memory_bytes).observe(devices, elsewhere=elsewhere)

    # --- what can be asked ---------------------------------------------------------------------

    @cached_property
    def by_uuid(self) -> Mapping[str, GpuDevice]:
        """Every device ever seen."""
        return {device.uuid: device for device in self.devices}

    @cached_property
    def held(self) -> Mapping[str, tuple[GpuDevice, ...]]:
        """Watcher name to what it holds, in the order of allocation."""
        return {name: tuple(self.by_uuid[uuid] for uuid in uuids) for name, uuids in self.held_uuids.items()}

    @cached_property
    def holder_of(self) -> Mapping[str, str]:
        """UUID to the watcher that holds it."""
        return {uuid: name for name, uuids in self.held_uuids.items() for uuid in uuids}

    @cached_property
    def taken(self) -> Mapping[str, str]:
        """UUIDs that a stranger or another namespace holds, or that vanished, and who that is."""
        result = {}
        for device in self.devices:
            uuid = device.uuid
            if uuid in self.holder_of or uuid in self.quarantined:
                continue
            gone = "nobody: it is not seen on this host any more" if uuid in self.vanished else None
            who = gone or self.elsewhere.get(uuid) or self.occupant(uuid)
            if who is not None:
                result[uuid] = who
        return result

    @cached_property
    def free(self) -> tuple[GpuDevice, ...]:
        """Devices that can be handed out now, by index."""
        gone = self.holder_of.keys() | self.quarantined.keys() | self.taken.keys()
        return tuple(device for device in self.devices if device.uuid not in gone)

    def occupant(self, uuid: str) -> str | None:
        """The device's occupant beside the workers that sleep there; None if nobody is seen."""
        device = without_sleepers(self.by_uuid[uuid], sleepers_on(uuid, self.sleepers))
        return occupant(device, self.stranger_memory_bytes)

    def free_for(self, share: float) -> tuple[GpuDevice, ...]:
        """Free devices on which a worker that takes this share of the memory fits; those where nobody sleeps first."""
        there = {device.uuid: sleepers_on(device.uuid, self.sleepers) for device in self.free}
        fits = [device for device in self.free if why_too_full(device, there[device.uuid], share) is None]
        return tuple(sorted(fits, key=lambda device: bool(there[device.uuid])))

    def in_use(self, uuid: str) -> bool:
        """A worker of ours holds it, or sleeps on it."""
        return uuid in self.holder_of or bool(sleepers_on(uuid, self.sleepers))

    def why_not_woken(self, watcher_name: str, share: float) -> str | None:
        """Why that sleeper cannot have its devices now; None if it can."""
        for uuid in self.sleepers[watcher_name].uuids:
            device = self.by_uuid[uuid]
            if uuid in self.holder_of:
                return f"{self.holder_of[uuid]} holds GPU {device.index} ({uuid})"
            if uuid in self.quarantined:
                return f"GPU {device.index} ({uuid}) is quarantined: {self.quarantined[uuid]}"
            if uuid in self.vanished:
                return f"GPU {device.index} ({uuid}) is not seen on this host any more"
            why = self.occupant(uuid) or why_too_full(device, sleepers_on(uuid, self.sleepers, watcher_name), share)
            if why is not None:
                return why if why.startswith("GPU") else f"GPU {device.index} ({uuid}) is held by {why}"
        return None

    # --- what can be changed -------------------------------------------------------------------

    def observe(self, devices: Sequence[GpuDevice], *, elsewhere: Mapping[str, str] | None = None) -> GpuLedger:
        """Take in a new sample. A device that is gone from it is not handed out; a new one is added."""
        seen = {device.uuid: device for device in devices}
        if len(seen) != len(devices):
            raise GpuError(f"two of the GPUs seen share a UUID: {', '.join(device.uuid for device in devices)}")
        merged = {**self.by_uuid, **seen}
        by_index = tuple(sorted(merged.values(), key=lambda device: (device.index, device.uuid)))
        return replace(
            self, devices=by_index, elsewhere=dict(elsewhere or {}), vanished=frozenset(merged.keys() - seen.keys())
        )

    def allocate(self, watcher_name: str, count: int, share: float = DEFAULT_VRAM_SHARE) -> GpuLedger:
        """The best-connected `count` free devices (see `topology.best_set`), now held by the watcher.

        Beside sleepers only where a worker that takes this `share` of the memory fits, and only where it must. Raises
        `GpuError` if the watcher holds some already or too few are free.
        """
        self._check_holds_nothing(watcher_name)
        if count < 0:
            raise GpuError(f"{watcher_name} asks for {count} GPUs; 0 or more are possible")
        free = self.free_for(share)
        if count > len(free):
            raise GpuError(shortage(self, [GpuAsk(watcher_name, watcher_name, count)]))
        alone = tuple(device for device in free if not sleepers_on(device.uuid, self.sleepers))
        free = alone if len(alone) >= count else free
        return self._holding(watcher_name, best_connected(free, count))

    def assign(self, watcher_name: str, uuids: Sequence[str]) -> GpuLedger:
        """Give exactly these devices: a worker that already runs on them (adoption) or restarts in place.

        A stranger on the device does not matter here (it may be that very worker); another holder,
        quarantine or an unknown device raises `GpuError`.
        """
        self._check_holds_nothing(watcher_name)
        if len(set(uuids)) != len(uuids):
            raise GpuError(f"{watcher_name} names a GPU twice: {', '.join(uuids)}")
        for uuid in uuids:
            self._check_known(uuid, f" of {watcher_name}")
            if uuid in self.holder_of:
                raise GpuError(f"GPU {uuid} cannot go to {watcher_name}: {self.holder_of[uuid]} holds it")
            if uuid in self.quarantined:
                raise GpuError(f"GPU {uuid} is quarantined ({self.quarantined[uuid]}) and cannot go to {watcher_name}")
        return self._holding(watcher_name, tuple(uuids))

    def release(self, watcher_name: str) -> GpuLedger:
        """The watcher's process is gone: it holds nothing any more.

        Whether a device is *free* then is for its next sample to say: memory that has not come back
        shows as taken. A watcher that holds nothing (it asked for none) is no error.
        """
        if watcher_name in self.sleepers:
            return replace(self, sleepers={name: each for name, each in self.sleepers.items() if name != watcher_name})
        if watcher_name not in self.held_uuids:
            return self
        kept = {name: uuids for name, uuids in self.held_uuids.items() if name != watcher_name}
        return replace(self, held_uuids=kept)

    def renamed(self, watcher_name: str, to: str) -> GpuLedger:
        """The watcher's devices are held by `to` from now on: the same process under another name."""
        uuids = self.held_uuids.get(watcher_name, ())
        self._check_holds_nothing(to)
        return self.release(watcher_name)._holding(to, uuids)

    def fall_asleep(self, watcher_name: str, sleeper: Sleeper) -> GpuLedger:
        """The watcher holds nothing any more; what its process keeps is on `sleeper.uuids`."""
        return replace(self.release(watcher_name), sleepers={**self.sleepers, watcher_name: sleeper})

    def wake(self, watcher_name: str, share: float = DEFAULT_VRAM_SHARE) -> GpuLedger:
        """The sleeper holds its devices again. Raises `GpuError` with the reason where it cannot."""
        why = self.why_not_woken(watcher_name, share)
        if why is not None:
            raise GpuError(f"{watcher_name} cannot have its GPUs back: {why}")
        return self.release(watcher_name)._holding(watcher_name, self.sleepers[watcher_name].uuids)

    def quarantine(self, uuid: str, reason: str) -> GpuLedger:
        """Hand this device out no more. Its holder holds it no more."""
        self._check_known(uuid)
        kept = {name: tuple(u for u in held if u != uuid) for name, held in self.held_uuids.items()}
        held = {name: uuids for name, uuids in kept.items() if uuids}
        return replace(self, held_uuids=held, quarantined={**self.quarantined, uuid: reason})

    def restore(self, uuid: str) -> GpuLedger:
        """End a quarantine: the memory came back after all. Raises `GpuError` if there was none."""
        if uuid not in self.quarantined:
            raise GpuError(f"GPU {uuid} is not quarantined")
        return replace(self, quarantined={other: why for other, why in self.quarantined.items() if other != uuid})

    def reserved_elsewhere(self, uuid: str, who: str) -> GpuLedger:
        """Another namespace was quicker with that device's lock; the next sample may say otherwise."""
        return replace(self, elsewhere={**self.elsewhere, uuid: who})

    def _holding(self, watcher_name: str, uuids: tuple[str, ...]) -> GpuLedger:
        return replace(self, held_uuids={**self.held_uuids, watcher_name: uuids}) if uuids else self

    def _check_holds_nothing(self, watcher_name: str) -> None:
        if watcher_name in self.held_uuids:
            raise GpuError(f"{watcher_name} already holds {', '.join(self.held_uuids[watcher_name])}; release it first")

    def _check_known(self, uuid: str, whose: str = "") -> None:
        if uuid not in self.by_uuid:
            known = ", ".join(f"{device.index} ({device.uuid})" for device in self.devices) or "none"
            raise GpuError(f"GPU {uuid}{whose} is not on this host; there are: {known}")


def plan(
    devices: Sequence[GpuDevice],
    asks: Sequence[GpuAsk],
    *,
    elsewhere: Mapping[str, str] | None = None,
    stranger_memory_bytes: int = STRANGER_MEMORY_BYTES,
) -> dict[str, tuple[GpuDevice, ...]]:
    """Devices for every ask, by watcher name, in the order of the asks; `()` for an ask of 0.

    Larger asks choose first (a set is harder to find than a single device), equal ones in the order given.
    Raises `GpuError` that names every ask and every device that is not available.
    """
    ledger = GpuLedger.of(devices, elsewhere=elsewhere, stranger_memory_bytes=stranger_memory_bytes)
    held = plan_on(ledger, asks).held
    return {ask.watcher_name: held.get(ask.watcher_name, ()) for ask in asks}


def plan_on(ledger: GpuLedger, asks: Sequence[GpuAsk]) -> GpuLedger:
    """`plan` on a ledger in which devices may be held already: the ledger that holds the result, too."""
    names = [ask.watcher_name for ask in asks]
    for name in names:
        if names.count(name) > 1:
            raise GpuError(f"GPUs were asked for twice under the name {name}")
        if name in ledger.held_uuids:
            raise GpuError(f"{name} already holds GPUs; release them first")
    for ask in asks:
        if ask.gpu < 0:
            raise GpuError(f"{ask.service} asks for {ask.gpu} GPUs per worker; 0 or more are possible")
    if sum(ask.gpu for ask in asks) > len(ledger.free):
        raise GpuError(shortage(ledger, asks))
    for ask in sorted(asks, key=lambda ask: -ask.gpu):
        ledger = ledger.allocate(ask.watcher_name, ask.gpu)
    return ledger


def shortage(gpus: GpuLedger, asks: Sequence[GpuAsk], promised: Mapping[str, int] | None = None) -> str:
    """One line: what each service asked for, per worker, and who holds what.

    `promised` counts free devices by the worker that they are kept for.
    """
    needed, free, total = sum(ask.gpu for ask in asks), len(gpus.free), len(gpus.devices)
    groups: dict[tuple[str, int], int] = {}
    for ask in asks:
        if ask.gpu:
            groups[ask.service, ask.gpu] = groups.get((ask.service, ask.gpu), 0) + 1
    wishes = [
        f"{service} asks for {gpu} GPU{'s' * (gpu != 1)} per worker x {workers} worker{'s' * (workers != 1)}"
        + (f" = {gpu * workers}" if workers > 1 else "")
        for (service, gpu), workers in groups.items()
    ]
    parts = [f"too few GPUs: {needed} needed, {free} of {total} free", *wishes]
    index = {device.uuid: device.index for device in gpus.devices}
    for name, held in gpus.held.items():
        parts += [f"GPU {device.index} ({device.uuid}) is held by {name}" for device in held]
    parts += [f"GPU {index[uuid]} ({uuid}) is held by {who}" for uuid, who in gpus.taken.items()]
    parts += [f"GPU {index[uuid]} ({uuid}) is quarantined: {why}" for uuid, why in gpus.quarantined.items()]
    parts += describe_sleepers(gpus.sleepers, index)
    parts += [f"{count} free kept for {who}" for who, count in (promised or {}).items()]
    return "; ".join(parts) + "; ask for less (`gpu` counts devices per worker) or free some"
