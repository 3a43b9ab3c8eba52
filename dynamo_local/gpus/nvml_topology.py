"""How the host's GPUs are wired, as link scores. Every call is optional: what is not supported is `Missing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_local.core.topology import (
    LINK_HOSTBRIDGE,
    LINK_INTERNAL,
    LINK_MULTIPLE,
    LINK_NODE,
    LINK_NVLINK,
    LINK_SINGLE,
    LINK_SYSTEM,
    LINK_UNKNOWN,
)
from dynamo_local.core.types import Missing

_NUMA_NODES_MAX = 64


def optional(nvml: Any, call: str, *args: Any) -> Any:
    """The call's result, or `Missing` with NVML's reason (not supported, no permission, unknown to this driver)."""
    try:
        return getattr(nvml, call)(*args)
    except nvml.NVMLError as error:
        return Missing(f"{call}: {error}")


def numa_node(nvml: Any, handle: Any) -> int | Missing:
    """The NUMA node whose memory is nearest to the GPU.

    Not `nvmlDeviceGetNumaNodeId`: that is the node of the GPU's *own* memory, on coherent machines only.
    """
    mask = optional(nvml, "nvmlDeviceGetMemoryAffinity", handle, 1, nvml.NVML_AFFINITY_SCOPE_NODE)
    if isinstance(mask, Missing):
        return mask
    nodes = [node for node in range(_NUMA_NODES_MAX) if mask[0] >> node & 1]
    return nodes[0] if len(nodes) == 1 else Missing(f"near {len(nodes)} NUMA nodes")


def links_between(nvml: Any, handles: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """UUID to UUID to link score (see `core.topology`); unknown pairs are left out."""
    nvlinks = {uuid: _nvlinks(nvml, handle) for uuid, handle in handles.items()}
    bus_ids = {uuid: _bus_id(nvml, handle) for uuid, handle in handles.items()}
    result: dict[str, dict[str, int]] = {uuid: {} for uuid in handles}
    uuids = list(handles)
    for i, a in enumerate(uuids):
        for b in uuids[i + 1 :]:
            wires = _wires(nvlinks[a], nvlinks[b], bus_ids[a], bus_ids[b])
            score = LINK_NVLINK + wires if wires else _pcie_score(nvml, handles[a], handles[b])
            if score != LINK_UNKNOWN:
                result[a][b] = result[b][a] = score
    return result


def _nvlinks(nvml: Any, handle: Any) -> list[str | None]:
    """The far end of each active NVLink: a PCI bus id, or None for a switch (or if NVML does not say)."""
    ends: list[str | None] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = optional(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if isinstance(state, Missing):
            break  # links are numbered without gaps; the first one that does not exist ends them
        if not state:
            continue
        kind = optional(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        remote = optional(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        is_gpu = isinstance(kind, Missing) or kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU
        ends.append(_text(remote.busId) if is_gpu and not isinstance(remote, Missing) else None)
    return ends


def _wires(of_a: list[str | None], of_b: list[str | None], bus_a: str | None, bus_b: str | None) -> int:
    """NVLinks between two GPUs: direct ones, else those that both have into a switch (all switches are one fabric)."""
    direct = sum(end == bus_b for end in of_a if end is not None) + sum(end == bus_a for end in of_b if end is not None)
    if direct:
        return (direct + 1) // 2  # each wire was seen from both ends
    return min(of_a.count(None), of_b.count(None))


def _bus_id(nvml: Any, handle: Any) -> str | None:
    pci = optional(nvml, "nvmlDeviceGetPciInfo", handle)
    return None if isinstance(pci, Missing) else _text(pci.busId)


def _text(value: str | bytes) -> str:
    return (value.decode() if isinstance(value, bytes) else value).lower()


def _pcie_score(nvml: Any, a: Any, b: Any) -> int:
    levels = {
        nvml.NVML_TOPOLOGY_INTERNAL: LINK_INTERNAL,
        nvml.NVML_TOPOLOGY_SINGLE: LINK_SINGLE,
        nvml.NVML_TOPOLOGY_MULTIPLE: LINK_MULTIPLE,
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: LINK_HOSTBRIDGE,
        nvml.NVML_TOPOLOGY_NODE: LINK_NODE,
        nvml.NVML_TOPOLOGY_SYSTEM: LINK_SYSTEM,
    }
    level = optional(nvml, "nvmlDeviceGetTopologyCommonAncestor", a, b)
    return LINK_UNKNOWN if isinstance(level, Missing) else levels.get(level, LINK_UNKNOWN)
