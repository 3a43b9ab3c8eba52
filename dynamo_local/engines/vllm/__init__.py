"""The vLLM engine: `AsyncLLM` in the worker's process, its EngineCore beside it. See docs/vllm.md.

Nothing here imports vLLM (and torch with it: ten seconds and more) until an engine is started.
"""

from __future__ import annotations

from dynamo_local.engines.vllm.engine import VllmEngine
from dynamo_local.engines.vllm.options import VllmOptions

__all__ = ["VllmEngine", "VllmOptions"]
