"""The agreement between an arbiter and its prewarmed processes, which have an engine's modules imported.

A prewarmed process becomes a worker of any service with the same environment. Only variables that are read late
(`LATE`) may differ: the others may have been read while the modules were imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

EngineName = Literal["sim", "vllm"]
TINY_MODEL = "sim-tiny"
"""The model's name that stands for the built-in tokenizer. Only the sim engine has no folder of its own."""

SPARE = "spare"
"""Its part of the watcher's name: `dynamo_spare`, `dynamo_spare_1`, …"""
SOCKET_FD = "DYN_SPARE_FD"
"""The descriptor of the spare's end of the socket to its arbiter."""
PADDING = "DYN_SPARE_ROOM"
"""Padding, so that the worker's marks fit into the memory in which the spare's environment is."""
PADDING_BYTES = 2048

MARKS = ("DYN_NAMESPACE", "DYN_STATEFILE", "DYN_RUN_ID", "DYN_WATCHER_NAME")
"""Variables by which processes of a run are found (`arbiter.marks`)."""

LATE = ("CUDA_VISIBLE_DEVICES", "DYN_*", "DYNAMO_SERVICE_CONFIG", "ETCD_*", "NATS_*")
"""Variables that nothing reads while an engine's modules are imported: a spare gets them with its order. A driver
reads the devices that it may see when it is initialised, which a spare never does."""


def is_late(name: str) -> bool:
    """Whether that variable may be given to a process that has its modules already."""
    return any(fnmatchcase(name, pattern) for pattern in LATE)


def early(env: Mapping[str, str], late: Iterable[str] = ()) -> dict[str, str]:
    """The part of an environment that a spare must have from the beginning; `late` are more names of the other kind."""
    named = frozenset(late)
    return {name: value for name, value in env.items() if name not in named and not is_late(name)}


def engine_of(engine: EngineName | None, model: str | None, tiny_model: str) -> EngineName:
    """The engine of a section with this `engine` and `model`: `sim` for the simulated model, else `vllm`."""
    return engine or ("sim" if model in (None, tiny_model) else "vllm")


def is_prewarmed(name: str, namespace: str) -> bool:
    """Whether a watcher of that name is a spare's."""
    bare = f"{namespace}_{SPARE}"
    return name == bare or (name.startswith(f"{bare}_") and name[len(bare) + 1 :].isdigit())
