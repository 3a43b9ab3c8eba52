"""The components that ship, in the processes of workers.

`from dynamo_local.components import Frontend, Processor, Router, VllmWorker, PrefillWorker`. Each is imported when it
is first asked for, so that a worker's start does not pay for its siblings' libraries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_local.components.frontend import Frontend
    from dynamo_local.components.prefill_worker import PrefillWorker
    from dynamo_local.components.processor import Processor
    from dynamo_local.components.router import Router
    from dynamo_local.components.vllm_worker import VllmWorker

_MODULES = {
    "Frontend": "frontend",
    "PrefillWorker": "prefill_worker",
    "Processor": "processor",
    "Router": "router",
    "VllmWorker": "vllm_worker",
}

__all__ = ["Frontend", "PrefillWorker", "Processor", "Router", "VllmWorker"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
