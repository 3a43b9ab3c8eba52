"""What a planner sees of its arbiter: the fleet counted, loads and the prefill queue, and whether it can see at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dynamo_local.clock import Clock
from dynamo_local.commands.launching import DYNAMO_1X
from dynamo_local.control.links import Links
from dynamo_local.control.sampling import Sampling
from dynamo_local.control.shell import Shell
from dynamo_local.core.actuators import WAKES, Actuator
from dynamo_local.core.life.states import TRAITS
from dynamo_local.core.types import GraphSpec, Load, Missing, Role
from dynamo_local.planner.policies.pools import pools_of
from dynamo_local.planner.pulling import Sampled
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.planner.values.pools import WorkerPools


class ArbiterWorld:
    """What the planner sees of its arbiter: `loop.World`, and both sources of metrics."""

    def __init__(
        self,
        shell: Shell,
        sampling: Sampling,
        links: Links,
        prefill: str | None,
        decode: str,
        clock: Clock,
        times: ScalingTimes,
    ) -> None:
        self._shell = shell
        self._sampling = sampling
        self._links = links
        self._prefill = prefill
        self._decode = decode
        self._clock = clock
        self._times = times
        self.pending: Callable[[], bool] = lambda: False
        """Whether another environment has yet to carry a decision out."""
        self.actuators: Callable[[], frozenset[Actuator]] = lambda: WAKES
        """By what the planner's decisions may be carried out."""
        self.waiting_in: Mapping[str, str] = {}
        """Where prefill workers are commands there is no queue of ours: component -> the field of its workers' loads
        that says what waits there for a prefill."""

    def worker_pools(self) -> WorkerPools:
        """Counted now. A draining worker whose keys are still in etcd can be given requests yet."""
        workers = self._shell.fleet.workers.values()
        routed = {w.name for w in workers if TRAITS[w.state].drains and w.lease is not None}
        pools = pools_of(
            self._shell.fleet, decode=self._decode, prefill=self._prefill, routed=routed, actuators=self.actuators()
        )
        return replace(self._times.told(pools), pending=self.pending())

    def ready(self) -> tuple[str, ...]:
        """Names of the ready decode workers."""
        return tuple(worker.name for worker in self._shell.fleet.ready(self._decode))

    def blind(self) -> str | None:
        """While etcd is away nobody knows who serves; while NATS is, nobody can be asked."""
        if not self._links.etcd_answers:
            return "etcd does not answer, so who serves is not known"
        if not self._links.answer:
            return "NATS is not connected, so loads and the prefill queue are not known"
        return None

    async def loads(self) -> Mapping[str, Sampled[Load]] | Missing:
        """See `LoadSource`."""
        sample = await self._sampling.loads()
        if sample.failed is not None:
            return sample.failed
        return {name: Sampled(load, at_s) for name, (load, at_s) in sample.loads.items()}

    async def depth(self) -> Sampled[int] | Missing:
        """See `QueueSource`."""
        if self.waiting_in:
            return await self._prefills_waiting()
        depth = await self._sampling.depth()
        return depth if isinstance(depth, Missing) else Sampled(depth.pending, self._clock.now_s())

    async def _prefills_waiting(self) -> Sampled[int] | Missing:
        """Requests that wait in the prefill workers, and in the frontends' routers for one. All must say it: a part
        of the sum is no sum."""
        sample = await self._sampling.loads()
        if sample.failed is not None:
            return sample.failed
        waiting, taken_s = 0, self._clock.now_s()
        for worker in [worker for worker in self._shell.fleet.workers.values() if worker.ready]:
            field = self.waiting_in.get(worker.component)
            if field is None:
                continue
            if worker.name not in sample.loads:
                return Missing(f"{worker.name} does not say what waits there")
            load, at_s = sample.loads[worker.name]
            count = getattr(load, field)
            if count is None:
                return Missing(f"{worker.name} does not say how many requests wait for a prefill")
            waiting, taken_s = waiting + count, min(taken_s, at_s)
        return Sampled(waiting, taken_s)


def prefills_wait_in(graph: GraphSpec, prefill: str | None) -> dict[str, str]:
    """`ArbiterWorld.waiting_in`: prefill workers that are commands, and Dynamo's frontends, whose routers hold back."""
    if prefill is None or graph.service(prefill).runtime is None:
        return {}
    fields = {DYNAMO_1X: "prefills_waiting"}
    return {
        spec.name: fields.get(spec.runtime or "", "num_requests_waiting")
        for spec in graph.services
        if spec.name == prefill or (spec.role is Role.FRONTEND and spec.runtime == DYNAMO_1X)
    }
