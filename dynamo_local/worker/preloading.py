"""The modules that a spare imports: those that a worker of its engine has when it is ready."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

from dynamo_local.errors import ConfigError

COMMON = (
    "dynamo_local.worker.serve_dynamo",
    "dynamo_local.worker.process",
    "dynamo_local.components.vllm_worker",
    "dynamo_local.components.prefill_worker",
    "dynamo_local.components.frontend",
    "dynamo_local.components.processor",
    "dynamo_local.components.router",
    "dynamo_local.transport.etcd",
    "dynamo_local.sdk.loader",
    "uvloop",
)
"""Modules of every worker with an engine. A graph's module imports all of its components."""
ENGINE = {
    "sim": ("dynamo_local.engines.sim", "numpy"),
    "vllm": ("dynamo_local.engines.vllm.preloading",),
}


def preload(engine: str) -> None:
    """Import them. Raises `ConfigError` for an engine that is not installed here."""
    for name in (*COMMON, *ENGINE[engine]):
        importlib.import_module(name)
    if engine == "vllm":
        from dynamo_local.engines.vllm.preloading import preload as preload_vllm

        preload_vllm()
    # Imported modules stay. If the collector never touches them again, a forked EngineCore shares their pages.
    gc.collect()
    gc.freeze()


def check_untouched() -> None:
    """Raises `ConfigError` if this process has begun to use a GPU: it could not be given another one any more."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError("importing the engine's modules has initialised CUDA; spares are of no use with it")
    opened = [target for target in _open_files() if target.startswith("/dev/nvidia-uvm")]
    if opened:
        raise ConfigError(f"importing the engine's modules has opened {opened[0]}; spares are of no use with it")


def _open_files() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(Path("/proc/self/fd") / entry))
        except OSError:
            continue  # the one of this very listing
    return found
