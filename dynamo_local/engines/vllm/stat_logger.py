"""The stat logger that vLLM calls after each pass, on the loop of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

Record = Callable[[Any, Any], None]
"""`(SchedulerStats or None, IterationStats or None)`."""


def stat_logger(record: Record) -> Callable[..., Any]:
    """A factory as `AsyncLLM` wants it; everything is passed on to `record`."""

    class _Logger(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.engine_index = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_more: Any, **_others: Any) -> None:
            record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return _Logger
