"""vLLM's own two schedulers, which also say what each pass computed. Imported by vLLM in EngineCore, by name."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dynamo_local.engines.vllm.pass_watch import ENDPOINT, Teller


class _Watched:
    """Before a scheduler class in the order of bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel: Any = self.parallel_config  # type: ignore[attr-defined]
        # Unlike data_parallel_rank it is right for dense models, too, whose ranks know nothing of each other.
        rank = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        self._teller = Teller(self, rank, os.environ[ENDPOINT])
        self._watch = self._teller.watch

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As the base does, and noted."""
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._watch.scheduled(output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base does, and noted."""
        self._watch.ended(scheduler_output)
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """As the base does."""
        self._teller.close()
        super().shutdown(*args, **kwargs)  # type: ignore[misc]


class WatchedScheduler(_Watched, Scheduler):  # type: ignore[misc, unused-ignore]
    """`Scheduler`, watched."""


class WatchedAsyncScheduler(_Watched, AsyncScheduler):  # type: ignore[misc, unused-ignore]
    """`AsyncScheduler`, watched."""
