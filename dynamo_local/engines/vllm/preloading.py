"""Modules of vLLM that a prewarmed process imports: those of the worker, of EngineCore and of the platform workers."""

from __future__ import annotations

import importlib
import logging

from dynamo_local.engines.vllm.checks import is_installed
from dynamo_local.errors import ConfigError

log = logging.getLogger(__name__)

MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "dynamo_local.engines.vllm.engine",
    "dynamo_local.engines.vllm.arguments",
    "dynamo_local.engines.vllm.stat_logger",
    "dynamo_local.engines.vllm.watched_schedulers",
)
USEFUL = (
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.executor.uniproc_executor",
    "vllm.tokenizers.hf",
)
"""Modules of this version of vLLM. Another version may have moved one; then it is imported later, when needed."""


def preload() -> None:
    """Import them. No device is touched. Raises `ConfigError` where vLLM is not installed."""
    if not is_installed():
        raise ConfigError("the engine is vllm, which is not installed here: no spare can be made of it")
    for name in MODULES:
        importlib.import_module(name)
    for name in USEFUL:
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.debug("not imported beforehand: %s", error)
    _platform()


def _platform() -> None:
    """The module of the workers of this host's platform, and the parser of arguments, which is slow the first time."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    importlib.import_module("vllm.v1.worker.cpu_worker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker")
