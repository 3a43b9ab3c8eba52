"""What is known of the engines' passes: the new ones and the last one of each, with their age. Pure.

A worker's passes are forgotten with the worker. One that did not answer keeps its last pass until that is
`STALE_AFTER_S` old; then it is `Missing`: an engine that tells nothing is not idle. An idle one says so each second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dynamo_local.core.types import Missing
from dynamo_local.planner.values.passes import Capabilities, EngineId, Engines, EngineSeen, ForwardPass

STALE_AFTER_S = 3.0
"""Three heartbeats."""
NEW_PASSES = 256
"""Of each engine, until somebody takes them."""


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker that serves. `worker_id` is what its engine calls itself, as far as that can be known beforehand."""

    name: str
    component: str
    worker_id: str


@dataclass(slots=True)
class _Engine:
    last: ForwardPass
    new: deque[ForwardPass] = field(default_factory=lambda: deque(maxlen=NEW_PASSES))


@dataclass(slots=True)
class _Worker:
    engines: dict[EngineId, _Engine] = field(default_factory=dict)
    silent: str | None = None
    ranks: int = 1


class PassTracker:
    """Fed with workers' answers (`heard`), read once per pull (`take`)."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._capabilities: dict[str, Capabilities] = {}
        self.missed: dict[EngineId, int] = {}
        """Passes that never came, by engine: gaps in their numbers."""

    def after(self) -> dict[str, int]:
        """The number of the last pass of each engine, by `worker id/rank`: what came before need not be told again."""
        return {
            f"{engine.worker_id}/{engine.dp_rank}": known.last.counter_id
            for worker in self._workers.values()
            for engine, known in worker.engines.items()
        }

    def heard(
        self,
        name: str,
        passes: Iterable[ForwardPass] | None,
        *,
        ranks: int = 1,
        missed: Mapping[str, int] | None = None,
    ) -> None:
        """A worker's answer; `passes` is None where it keeps none. Of what is older than is known nothing is taken,
        unless the engine was started again (its numbers began anew)."""
        worker = self._workers.setdefault(name, _Worker())
        worker.ranks = ranks
        worker.silent = "it keeps no passes (forward-passes is off)" if passes is None else None
        current: set[EngineId] = set()
        for passed in passes or ():
            current.add(passed.engine)
            known = worker.engines.get(passed.engine)
            if known is None:
                known = worker.engines[passed.engine] = _Engine(passed)
                if not passed.heartbeat:
                    known.new.append(passed)
            elif passed.counter_id > known.last.counter_id or passed.at_s > known.last.at_s + STALE_AFTER_S:
                known.last = passed
                if not passed.heartbeat:
                    known.new.append(passed)
            elif passed.heartbeat and passed.at_s > known.last.at_s:
                known.last = passed
        for engine in current:
            self.missed[engine] = (missed or {}).get(str(engine.dp_rank), 0)
        ids = {engine.worker_id for engine in current}
        if ids:  # its instance id has changed: the old one is nobody's
            worker.engines = {engine: known for engine, known in worker.engines.items() if engine.worker_id in ids}

    def can(self, component: str, capabilities: Capabilities) -> None:
        """What a worker of the component said of its engine."""
        self._capabilities[component] = capabilities

    def capabilities(self) -> Mapping[str, Capabilities]:
        """By component, as last heard."""
        return dict(self._capabilities)

    def take(self, ready: Iterable[ReadyWorker], now_s: float) -> Engines:
        """The engines of the ready workers, with what came since the last call; all others are forgotten."""
        ready = tuple(ready)
        names = {worker.name for worker in ready}
        self._workers = {name: worker for name, worker in self._workers.items() if name in names}
        seen: dict[EngineId, EngineSeen] = {}
        for worker in ready:
            seen.update(self._engines_of(worker, now_s))
        self.missed = {engine: count for engine, count in self.missed.items() if engine in seen}
        return seen

    def _engines_of(self, ready: ReadyWorker, now_s: float) -> dict[EngineId, EngineSeen]:
        worker = self._workers.get(ready.name, _Worker())
        worker_id = next((engine.worker_id for engine in worker.engines), ready.worker_id)
        why = worker.silent or "it has told no pass yet"
        seen = {
            EngineId(worker_id, rank): EngineSeen(ready.component, (), Missing(f"{ready.name}: {why}"))
            for rank in range(worker.ranks)
        }
        for engine, known in worker.engines.items():
            age_s = now_s - known.last.at_s
            stale = Missing(f"the last pass of {ready.name} is {age_s:.1f} s old") if age_s > STALE_AFTER_S else None
            seen[engine] = EngineSeen(ready.component, tuple(known.new), stale or known.last)
            known.new.clear()
        return seen
