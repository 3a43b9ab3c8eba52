"""What a worker asks of its host, as what a container asks of a node."""

from __future__ import annotations

import re

from dynamo_local.core.types import Resources as Wanted
from dynamo_local.kubernetes.model import GPU_RESOURCE, Resources

_MEMORY = re.compile(r"(?P<number>[\d.]+)(?P<unit>[EPTGMKk]?i?)B?")


def container_resources(wanted: Wanted) -> Resources | None:
    """GPUs as limits (they cannot be shared), CPUs and memory as requests; None where nothing is asked for."""
    requests = {"cpu": wanted.cpu, "memory": None if wanted.memory is None else quantity(wanted.memory)}
    asked = {name: value for name, value in requests.items() if value is not None}
    found = Resources()
    if wanted.gpu:
        found.limits = {GPU_RESOURCE: str(wanted.gpu)}
    if asked:
        found.requests = dict(asked)
    return found if found.model_fields_set else None


def quantity(memory: str) -> str:
    """`20GiB`, `20GB`, `20K` as Kubernetes writes them: `20Gi`, `20G`, `20k`."""
    matched = _MEMORY.fullmatch(memory)
    if matched is None:
        return memory
    unit = matched["unit"]
    return matched["number"] + ("k" if unit == "K" else "Ki" if unit == "ki" else unit)
