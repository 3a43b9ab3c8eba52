"""The way of a request, as in the real data plane: choose a worker, prefill here or remotely, take over the KV, decode.

`core.routing.choice` and `core.routing.disagg` decide. The engines are `SimScheduler`s. Hops over NATS and TCP take no
time here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from dynamo_local.core.routing.choice import Picker
from dynamo_local.core.routing.disagg import QueueView, decide_prefill
from dynamo_local.core.routing.estimates import Timing
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.core.routing.prompts import Ask, PrefillLine
from dynamo_local.core.types import Load, Role
from dynamo_local.engines.sim.facts import load_of, shape_of
from dynamo_local.engines.sim.requests import (
    Event,
    Finished,
    HandoffExpired,
    PullReady,
    SchedulerConfig,
    SimRequest,
    Started,
    Tokens,
)
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.profile.interpolation import PerfModel
from dynamo_local.simulator.fleet import VirtualFleet
from dynamo_local.simulator.observed import ObservedPasses, ObservedTraffic
from dynamo_local.simulator.options import SimulationOptions
from dynamo_local.simulator.process import Agenda, Dropped, Job, SimulatedProcess, What, entry_of, is_entry, samples_of
from dynamo_local.simulator.trace import block_keys

# --- The decode worker's decision: prefill here or remotely. It uses the functions of a real worker.


class PrefillChoices:
    """Decides for all decode workers of a run, each by what it knows itself; `queue` is what they sample."""

    def __init__(
        self, options: SimulationOptions, perf: PerfModel, config: SchedulerConfig, queue: PrefillLine[Job]
    ) -> None:
        self._options = options
        self._timing = Timing(perf, config.speed)
        self._config = config
        self._queue = queue
        self._computing = 0

    def side(self, role: Role) -> DecodeSide | None:
        """The estimator of a new worker of that role. None: thresholds decide, or there is no remote prefill."""
        if self._options.disagg_policy != "slo" or role is not Role.DECODE:
            return None
        return DecodeSide(
            self._timing,
            self._options.targets,
            max_kv_tokens=self._config.num_gpu_blocks * self._config.block_size,
            max_pass_tokens=self._config.max_num_batched_tokens,
        )

    def decide(
        self, process: SimulatedProcess, job: Job, prefill_workers: int, computing: int, now_s: float
    ) -> tuple[bool, float | None]:
        """Whether its prefill goes to the queue, and by when it has to begin there (None: no target).

        `computing` prefills are under way.
        """
        depth = process.depth
        if depth.due(now_s):
            depth.asked()
            waiting = len(self._queue)
            depth.sampled(QueueView(waiting, waiting + computing, self._queue.late), now_s)
        length = job.request.input_length
        cached = process.scheduler.matched_tokens(job.keys)
        side = process.side
        if side is None:
            decision = decide_prefill(
                prompt_length=length,
                prefix_hit_rate=cached / length,
                queue_size=depth.pending,
                prefill_workers=prefill_workers,
                settings=self._options.disagg,
                conditional=self._options.conditional,
            )
            remote, start_by_s = decision.remote, None
        else:
            name = str(job.number)
            side.began(name, length, now_s)
            if (itl_s := process.scheduler.itl_s) is not None:
                side.itl_seen(itl_s, now_s)
            ask = Ask(length, cached, now_s - job.request.at_s)
            choice = side.decide(ask, now_s, queue=depth.view, prefill_workers=prefill_workers)
            remote, start_by_s = choice.remote, choice.start_by_s
            side.follow(name, ask, choice, now_s)
        if remote:
            depth.enqueued()
        return remote, start_by_s

    def submitted(self, side: DecodeSide, job: Job, now_s: float, *, pull: bool) -> None:
        """It goes into the decode worker's engine: with its KV to be pulled, or as a prompt that was to be remote."""
        name = str(job.number)
        if pull:
            side.handed_over(name, now_s)
        elif side.is_away(name):
            side.went_local(name, job.request.input_length, now_s)


DECODES = (Role.DECODE, Role.AGGREGATED)


class Flow:
    """Requests among the processes of a fleet. Every call takes the time and brings what it touches to it."""

    def __init__(
        self, options: SimulationOptions, perf: PerfModel, agenda: Agenda, picker: Picker, *, watches: bool = False
    ) -> None:
        config, self.max_model_len = shape_of(options.sim, perf)
        self._config = replace(config, coalesce=options.coalesce)
        self._options = options
        self._perf = perf
        self._agenda = agenda
        self._picker = picker
        self._queue: PrefillLine[Job] = PrefillLine()
        self._choices = PrefillChoices(options, perf, self._config, self._queue)
        self._idle: deque[SimulatedProcess] = deque()
        self._processes: dict[int, SimulatedProcess] = {}
        self._dirty: set[int] = set()
        self._jobs: dict[int, Job] = {}
        self._fleet: VirtualFleet
        self._all: list[SimulatedProcess] = []
        self.ended = 0
        self.seen = ObservedTraffic()
        self.observed_passes = ObservedPasses() if watches else None
        """None where nobody looks at them: to keep them costs time."""

    def attach(self, fleet: VirtualFleet) -> None:
        """Both know each other: the fleet makes processes, the flow uses them."""
        self._fleet = fleet
        fleet.joined, fleet.cut = self._joined, self._cut
        for process in fleet.serving(Role.PREFILL):
            self._joined(process, 0.0)

    def make_process(self, instance_id: int, name: str, role: Role) -> SimulatedProcess:
        """A fresh engine: its cache is empty."""
        watch = None if self.observed_passes is None else self.observed_passes.watch(instance_id)
        scheduler = SimScheduler(self._config, self._perf, watch=watch)
        side, pulls = self._choices.side(role), role is Role.PREFILL
        process = SimulatedProcess(instance_id, name, role, scheduler, side=side, pulls=pulls)
        self._processes[instance_id] = process
        self._all.append(process)
        return process

    @property
    def passes(self) -> int:
        """Passes of all engines so far."""
        return sum(process.scheduler.passes for process in self._all)

    @property
    def preemptions(self) -> int:
        """Requests that lost their KV and were computed again."""
        return sum(process.scheduler.preemptions for process in self._all)

    @property
    def pending(self) -> int:
        """Entries of the prefill queue that nobody has pulled."""
        return len(self._queue)

    def serving(self, now_s: float, *roles: Role) -> list[SimulatedProcess]:
        """Those that serve, at this moment."""
        found = self._fleet.serving(*roles)
        for process in found:
            self._roll(process, now_s)
        return found

    def loads(self, now_s: float) -> dict[str, Load]:
        """Name -> load of each serving decode worker."""
        return {process.name: load_of(process.scheduler) for process in self.serving(now_s, *DECODES)}

    # --- time ----------------------------------------------------------------------------------

    def engine_due(self, instance_id: int, at_s: float) -> None:
        """An engine's event; nothing for one that was put off."""
        process = self._processes.get(instance_id)
        if process is not None and process.due_s == at_s:
            process.due_s = None
            self._roll(process, at_s)

    def settle(self) -> None:
        """All that happens at this instant has been told: ask the engines that it touched when they are due."""
        for instance_id in sorted(self._dirty):
            process = self._processes.get(instance_id)
            if process is None:
                continue
            due_s = process.scheduler.next_event_at(quiet=self._options.coalesce)
            if due_s is not None and due_s != process.due_s:
                self._agenda.add(due_s, What.ENGINE, instance_id)
            process.due_s = due_s
        self._dirty.clear()

    def _roll(self, process: SimulatedProcess, now_s: float) -> None:
        self._dirty.add(process.instance_id)
        for event in process.scheduler.advance(now_s):
            if type(event) is Tokens and event.first and process.side is None:
                continue  # most events; only first tokens are looked at
            self._on_event(process, event, now_s)

    def _on_event(self, process: SimulatedProcess, event: Event, now_s: float) -> None:
        if isinstance(event, Tokens):
            if not is_entry(event.request_id):
                job = process.streams[event.request_id]
                if event.first == 0:
                    job.first_s = event.times_s[0]
                    self.seen.first_token(job, job.first_s)
                if process.side is not None:
                    process.side.tokens(str(job.number), len(event.times_s), event.times_s[0])
        elif isinstance(event, Finished):
            job = process.streams.pop(event.request_id)
            if is_entry(event.request_id):
                process.prefilling -= 1
                self._prefilled(process, job, now_s)
            else:
                self._completed(process, job, event.at_s)
            self._fleet.check_exit(process, now_s)
        elif isinstance(event, Started):
            prompt = process.streams[event.request_id].request.input_length
            self.seen.looked_up(event.at_s, event.num_cached_tokens, prompt)
        elif isinstance(event, PullReady):
            self._pull(process, process.streams[event.request_id], event.num_tokens, now_s)
        elif isinstance(event, HandoffExpired):
            self._fleet.check_exit(process, now_s)

    # --- arrival -------------------------------------------------------------------------------

    def arrive(self, job: Job, now_s: float) -> None:
        """A client asks."""
        self.seen.began(job, now_s)
        request = job.request
        if request.input_length + request.output_length > self.max_model_len:
            self._drop(job, Dropped.TOO_LONG)
            return
        if len(self._jobs) >= self._options.max_inflight:
            self._drop(job, Dropped.FRONTEND_FULL)
            return
        self._jobs[job.number] = job
        self._agenda.add(now_s + self._options.request_timeout_s, What.REQUEST_DEADLINE, job.number)
        job.keys = block_keys(request.hash_ids, request.input_length, self._config.block_size)
        self._dispatch(job, now_s)

    def _dispatch(self, job: Job, now_s: float) -> None:
        """To the worker that the picker names; full ones refuse, and others are asked."""
        candidates = {process.instance_id: process for process in self._fleet.serving(*DECODES)}
        refused, length = bool(candidates), job.request.input_length
        while candidates:
            picked = self._picker.pick(
                list(candidates), samples_of(candidates, now_s, self._roll), prompt_tokens=length
            )
            process = candidates.pop(picked)
            self._roll(process, now_s)
            if process.num_waiting < self._options.max_num_waiting:
                self._picker.routed(picked, str(job.number), job.request.output_length, now_s, length)
                self._take(process, job, now_s)
                return
        self._drop(job, Dropped.WORKERS_FULL if refused else Dropped.NO_WORKER)

    def _take(self, process: SimulatedProcess, job: Job, now_s: float) -> None:
        """The decode worker's decision: prefill here, or there."""
        job.worker = process
        job.tries += 1
        process.last_arrival_s = now_s
        if process.role is Role.AGGREGATED:
            self._submit(process, job, now_s)
            return
        prefillers = self._fleet.serving(Role.PREFILL)
        computing = sum(each.prefilling for each in prefillers)
        remote, start_by_s = self._choices.decide(process, job, len(prefillers), computing, now_s)
        if not remote:
            self._submit(process, job, now_s)
            return
        job.queued = job.away = job.remote = True
        process.waiting[job.number] = job
        self._queue.append(job, start_by_s)
        self._agenda.add(now_s + self._options.prefill_timeout_s, What.PREFILL_DEADLINE, job.number)
        self._feed(now_s)

    def _submit(self, process: SimulatedProcess, job: Job, now_s: float, *, pull: bool = False) -> None:
        """Into the decode worker's engine."""
        request = job.request
        job.engine_id = f"{job.number}-{job.tries}" if pull else f"{job.number}-{job.tries}-local"
        process.streams[job.engine_id] = job
        if process.side is not None:
            self._choices.submitted(process.side, job, now_s, pull=pull)
        self._roll(process, now_s)
        process.scheduler.submit(
            SimRequest(
                job.engine_id,
                request.input_length,
                request.output_length,
                max_output_tokens=request.output_length,
                block_keys=job.keys,
                pull_kv=pull,
            ),
            now_s,
        )

    # --- prefill elsewhere ---------------------------------------------------------------------

    def _joined(self, process: SimulatedProcess, now_s: float) -> None:
        """Give work to this process if it pulls. The picker finds the others. The name may be new after a flip."""
        if process.side is None:
            process.side = self._choices.side(process.role)
        if process.pulls and not process.prefilling and process not in self._idle:
            self._idle.append(process)
            self._feed(now_s)

    def _feed(self, now_s: float) -> None:
        """Entries to the prefill workers whose pass is free; who has waited longest gets the first."""
        while self._queue and self._idle:
            process = self._idle.popleft()
            if not (process.serves and process.pulls):
                continue
            job = self._queue.popleft(process.turns, now_s)
            job.queued, job.source = False, process
            process.last_arrival_s = now_s
            entry = entry_of(job)
            process.streams[entry] = job
            process.prefilling += 1
            self._roll(process, now_s)
            length = job.request.input_length
            request = SimRequest(entry, length, 1, max_output_tokens=1, block_keys=job.keys, hold_kv=True)
            process.scheduler.submit(request, now_s)

    def _prefilled(self, process: SimulatedProcess, job: Job, now_s: float) -> None:
        """The reply goes to the decode worker, if it still waits; else the KV's lease frees it."""
        if process.serves and process.pulls:
            self._idle.append(process)
            self._feed(now_s)
        if job.away and job.source is process and job.worker is not None:
            job.away = False
            del job.worker.waiting[job.number]
            self._submit(job.worker, job, now_s, pull=True)

    def prefill_deadline(self, number: int, now_s: float) -> None:
        """Waited long enough: the decode worker prefills itself, and takes its entry out of the queue."""
        job = self._jobs.get(number)
        if job is None or not job.away or job.worker is None:
            return
        self._abandon(job)
        self._submit(job.worker, job, now_s)

    def _abandon(self, job: Job) -> None:
        if job.queued:
            self._queue.remove(job)
        job.queued = job.away = False
        job.source = None
        if job.worker is not None:
            job.worker.waiting.pop(job.number, None)

    # --- hand-over of the KV -------------------------------------------------------------------

    def _pull(self, process: SimulatedProcess, job: Job, num_tokens: int, now_s: float) -> None:
        source = job.source
        if source is None or source.instance_id not in self._processes:
            self._pull_failed(process, job, now_s)
            return
        self._roll(source, now_s)
        try:
            source.scheduler.pin(entry_of(job), now_s)
        except KeyError:  # its lease is over
            self._pull_failed(process, job, now_s)
            return
        self._agenda.add(now_s + self._options.sim.transfer_s(num_tokens), What.PULLED, job.number)

    def pulled(self, number: int, now_s: float) -> None:
        """The KV has arrived: the source is rid of it, the decode worker goes on."""
        job = self._jobs.get(number)
        if job is None or job.source is None or job.worker is None:
            return
        source, process = job.source, job.worker
        if source.instance_id not in self._processes:
            self._pull_failed(process, job, now_s)
            return
        self._roll(source, now_s)
        source.scheduler.release(entry_of(job), now_s)
        self._fleet.check_exit(source, now_s)
        job.source = None
        self._roll(process, now_s)
        process.scheduler.pulled(job.engine_id, now_s)

    def _pull_failed(self, process: SimulatedProcess, job: Job, now_s: float) -> None:
        """As after a `KvTransferError`: the decode worker prefills itself."""
        self._dirty.add(process.instance_id)
        process.scheduler.abort(job.engine_id, now_s)
        del process.streams[job.engine_id]
        job.source = None
        self._submit(process, job, now_s)

    # --- the end -------------------------------------------------------------------------------

    def _completed(self, process: SimulatedProcess, job: Job, at_s: float) -> None:
        job.last_s = at_s
        self.seen.ended(job, at_s)
        self._left(process, job, at_s, completed=True)
        self._end(job)

    def _left(self, process: SimulatedProcess, job: Job, now_s: float, *, completed: bool = False) -> None:
        self._picker.finished(process.instance_id, str(job.number), now_s)
        if process.side is not None:
            process.side.ended(str(job.number), completed=completed)

    def request_deadline(self, number: int, now_s: float) -> None:
        """The Frontend gives the request up, wherever it is (504)."""
        job = self._jobs.get(number)
        if job is None or (process := job.worker) is None:
            return
        self._roll(process, now_s)
        if job.ended:
            return
        self._left(process, job, now_s)
        self._release_source(job, now_s)
        self._abandon(job)
        if process.streams.pop(job.engine_id, None) is not None:
            process.scheduler.abort(job.engine_id, now_s)
        self._drop(job, Dropped.DEADLINE)
        self._fleet.check_exit(process, now_s)

    def _drop(self, job: Job, why: Dropped) -> None:
        job.dropped = why
        self._end(job)

    def _end(self, job: Job) -> None:
        self._jobs.pop(job.number, None)
        job.worker = job.source = None
        job.keys = ()
        self.ended += 1

    def _cut(self, process: SimulatedProcess, now_s: float) -> None:
        """A process was killed with work in it. Requests without a token go to another worker; the rest are lost."""
        self._roll(process, now_s)
        prefills = [job for engine_id, job in process.streams.items() if is_entry(engine_id)]
        decodes = [job for engine_id, job in process.streams.items() if not is_entry(engine_id)]
        decodes += process.waiting.values()
        process.streams.clear()
        process.waiting.clear()
        self._forget(process)
        for job in sorted(prefills, key=lambda job: job.number):
            if job.away and job.source is process and job.worker not in (None, process):
                self._abandon(job)
                self._submit(job.worker, job, now_s)
        for job in sorted(decodes, key=lambda job: job.number):
            self._left(process, job, now_s)
            self._release_source(job, now_s)
            self._abandon(job)
            job.worker = None
            if job.first_s is not None:
                self._drop(job, Dropped.CUT)
            elif job.tries >= self._options.max_tries:
                self._drop(job, Dropped.KILLED)
            else:
                self._dispatch(job, now_s)

    def _release_source(self, job: Job, now_s: float) -> None:
        if job.source is not None and not job.away and job.source.instance_id in self._processes:
            self._roll(job.source, now_s)
            job.source.scheduler.unpin(entry_of(job), now_s)

    def _forget(self, process: SimulatedProcess) -> None:
        self._dirty.discard(process.instance_id)
        self._processes.pop(process.instance_id, None)
