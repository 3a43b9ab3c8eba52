"""Properties of the simulated engine's scheduler, over random scripts of what may happen to it."""

from __future__ import annotations

import contextlib
import heapq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.engines.sim.requests import (
    Finished,
    HandoffExpired,
    Preempted,
    PullReady,
    SchedulerConfig,
    SimRequest,
    Started,
    Tokens,
)
from dynamo_local.engines.sim.scheduler import PassDone, SimScheduler
from dynamo_local.profile.interpolation import FixedModel
from tests.tools.examples import examples

# Binary fractions of a second, so that arrivals really fall on the ends of passes.
TICK_S = 1 / 64
PERF = FixedModel(
    prefill_ms_per_token=1000 / 1024, decode_ms=1000 / 64, decode_ms_per_kv_token=1000 / 8192, launch_ms=1000 / 128
)
BLOCKS, BLOCK_SIZE = 12, 4
PIN_TICKS = 9
"""A pull by another engine ends: a pin for ever would be blocks for ever."""


@dataclass(frozen=True)
class Op:
    """One thing that the world does at `at` ticks. `target` chooses a request by its number."""

    at: int
    kind: str
    prompt: int = 1
    output: int = 1
    family: int = 0
    delay: int = 0
    target: int = 0


def ops() -> st.SearchStrategy[list[Op]]:
    """Scripts of up to 25 operations over 120 ticks (the cache holds 48 tokens)."""
    submit = st.builds(
        Op,
        at=st.integers(0, 120),
        kind=st.sampled_from(["plain", "plain", "plain", "hold", "pull"]),
        prompt=st.integers(1, 30),
        output=st.integers(1, 18),
        family=st.integers(0, 2),
        delay=st.integers(0, 6),
    )
    other = st.builds(
        Op,
        at=st.integers(0, 120),
        kind=st.sampled_from(["abort", "release", "pin", "unpin", "look"]),
        target=st.integers(0, 24),
    )
    return st.lists(st.one_of(submit, submit, other), min_size=1, max_size=25)


def configs() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.sampled_from([1, 2, 5, 8, 64]),
            "kv_lease_duration_s": st.sampled_from([3 * TICK_S, 1.0]),
            "accept_length": st.sampled_from([1.0, 1.0, 1.7, 3.0]),
        }
    )


@dataclass
class History:
    """Shows what came out, in a form that does not depend on how many events carried it."""

    tokens: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    others: list[tuple[Any, ...]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    passes: list[PassDone] = field(default_factory=list)
    end: tuple[Any, ...] = ()


def request_of(number: int, op: Op) -> SimRequest:
    """Prompts of one family share their first blocks; the output's keys are the request's own."""
    full = op.prompt // BLOCK_SIZE

    def output_keys(computed: int) -> list[Any]:
        return [("output", number, block) for block in range(full, computed // BLOCK_SIZE)]

    return SimRequest(
        str(number),
        op.prompt,
        op.output,
        max_output_tokens=op.output,
        block_keys=[("family", op.family, block) for block in range(full)],
        output_keys=output_keys,
        hold_kv=op.kind == "hold",
        pull_kv=op.kind == "pull",
    )


class World:
    """Drives one scheduler through a script, answering its pulls, and checks what must always hold."""

    def __init__(self, config: dict[str, Any], script: list[Op], *, coalesce: bool, quiet: bool) -> None:
        self.history = History()
        shape = SchedulerConfig(BLOCKS, BLOCK_SIZE, coalesce=coalesce, **config)
        self.scheduler = SimScheduler(shape, PERF, watch=self.history.passes)
        self.quiet = quiet
        self.script = sorted(enumerate(script), key=lambda item: item[1].at)
        self.delays = {str(number): op.delay for number, op in enumerate(script)}
        self.pulls: list[tuple[float, str]] = []

    def run(self) -> History:
        done = 0
        while True:
            due = [self.scheduler.next_event_at(quiet=self.quiet)]
            due += [self.script[done][1].at * TICK_S] if done < len(self.script) else []
            due += [self.pulls[0][0]] if self.pulls else []
            times = [at_s for at_s in due if at_s is not None]
            if not times:
                break
            now_s = min(times)
            self.take(self.scheduler.advance(now_s))
            while self.pulls and self.pulls[0][0] <= now_s:
                request_id = heapq.heappop(self.pulls)[1]
                with contextlib.suppress(KeyError):  # it was aborted meanwhile
                    self.scheduler.pulled(request_id, now_s)
                self.scheduler.unpin(request_id, now_s)
            while done < len(self.script) and self.script[done][1].at * TICK_S <= now_s:
                self.apply(*self.script[done], now_s)
                done += 1
            self.check()
        scheduler = self.scheduler
        pool = scheduler.pool
        self.history.end = (
            scheduler.preemptions,
            scheduler.passes,
            scheduler.prefix_hit_rate,
            scheduler.itl_s,
            pool.used,
        )
        self.history.end += (dict(pool._by_key), list(pool._cached), list(pool._blank))
        return self.history

    def apply(self, number: int, op: Op, now_s: float) -> None:
        scheduler, target = self.scheduler, str(op.target)
        if op.kind in ("plain", "hold", "pull"):
            scheduler.submit(request_of(number, op), now_s)
        elif op.kind == "abort":
            scheduler.abort(target, now_s)
        elif op.kind == "release":
            scheduler.release(target, now_s)
        elif op.kind == "unpin":
            scheduler.unpin(target, now_s)
        elif op.kind == "pin" and target in scheduler._held:
            scheduler.pin(target, now_s)
            heapq.heappush(self.pulls, (now_s + PIN_TICKS * TICK_S, target))
        else:
            self.history.others.append(
                (now_s, scheduler.num_running, scheduler.num_waiting, scheduler.pool.used, scheduler.remaining_tokens)
            )

    def take(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                seen = self.history.tokens.setdefault(event.request_id, [])
                seen += [(event.first + i, at_s) for i, at_s in enumerate(event.times_s)]
                continue
            if isinstance(event, PullReady):
                pulled_at_s = event.at_s + self.delays[event.request_id] * TICK_S
                heapq.heappush(self.pulls, (pulled_at_s, event.request_id))
            if isinstance(event, Started):
                self.history.order.append(event.request_id)
            handoff = tuple(event.handoff.blocks) if isinstance(event, Finished) and event.handoff else ()
            self.history.others.append((*event[:3], handoff))

    def check(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        assert pool.used + pool.free == pool.total == BLOCKS
        assert set(pool._blank).isdisjoint(pool._cached)
        assert sum(1 for count in pool._references if count > 0) == pool.used
        assert min(pool._references) >= 0
        assert scheduler.num_running <= scheduler.config.max_num_seqs
        assert scheduler.pass_tokens <= scheduler.config.max_num_batched_tokens


@settings(max_examples=examples(400))
@given(config=configs(), script=ops())
def test_quiet_runs_equal_pass_by_pass(config: dict[str, Any], script: list[Op]) -> None:
    slow = World(config, script, coalesce=False, quiet=False).run()
    for quiet in (False, True):
        assert World(config, script, coalesce=True, quiet=quiet).run() == slow


@settings(max_examples=examples(200))
@given(config=configs(), script=ops())
def test_every_request_gets_its_tokens_once_in_order(config: dict[str, Any], script: list[Op]) -> None:
    history = World(config, script, coalesce=True, quiet=True).run()
    finished = {event[0] for event in history.others if len(event) == 4 and event[2] in ("stop", "length")}
    aborted = {str(op.target) for op in script if op.kind == "abort"}
    for number, op in enumerate(script):
        if op.kind not in ("plain", "hold", "pull"):
            continue
        tokens = history.tokens.get(str(number), [])
        assert [index for index, _ in tokens] == list(range(len(tokens)))
        together = config["accept_length"] > 1  # the accepted tokens of one pass
        assert all(a < b or (together and a == b) for (_, a), (_, b) in pairwise(tokens))
        assert len(tokens) <= op.output
        if str(number) not in aborted:
            assert len(tokens) == op.output
            assert str(number) in finished


@settings(max_examples=examples(200))
@given(config=configs(), script=ops())
def test_admission_is_first_in_first_out(config: dict[str, Any], script: list[Op]) -> None:
    world = World(config, script, coalesce=True, quiet=False)
    arrivals = [str(number) for number, op in world.script if op.kind in ("plain", "hold", "pull")]
    order = world.run().order
    assert order == [request_id for request_id in arrivals if request_id in set(order)]


@settings(max_examples=examples(100))
@given(config=configs(), script=ops())
def test_the_same_script_gives_the_same_history(config: dict[str, Any], script: list[Op]) -> None:
    first = World(config, script, coalesce=True, quiet=True).run()
    assert World(config, script, coalesce=True, quiet=True).run() == first


@settings(max_examples=examples(100))
@given(script=ops(), lag=st.integers(1, 40))
def test_a_late_caller_catches_up_without_drift(script: list[Op], lag: int) -> None:
    script = [op for op in script if op.kind == "plain"]
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    punctual = World(config, script, coalesce=True, quiet=False).run()
    scheduler = SimScheduler(SchedulerConfig(BLOCKS, BLOCK_SIZE, **config), PERF)
    late = World(config, script, coalesce=True, quiet=False)
    late.scheduler = scheduler
    now_s = 0.0
    for number, op in late.script:
        while now_s + lag * TICK_S < op.at * TICK_S:
            now_s += lag * TICK_S
            late.take(scheduler.advance(now_s))
        scheduler.submit(request_of(number, op), op.at * TICK_S)
    late.take(scheduler.advance(1e6))
    assert late.history.tokens == punctual.tokens
    assert late.history.others == punctual.others


def test_the_scripts_reach_what_they_are_for() -> None:
    script = [Op(0, "plain", 14, 18, family=n, delay=0) for n in range(3)]
    script += [Op(1, "hold", 5, 1), Op(90, "pull", 8, 3, delay=2), Op(110, "plain", 13, 2, family=2)]
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "kv_lease_duration_s": 3 * TICK_S}
    world = World(config, script, coalesce=True, quiet=True)
    seen: list[Any] = []
    take = world.take
    world.take = lambda events: (seen.extend(events), take(events))[1]  # type: ignore[method-assign]
    world.run()
    assert {type(event) for event in seen} == {Tokens, Started, Finished, Preempted, PullReady, HandoffExpired}
    assert world.scheduler.prefix_hit_rate > 0
    assert world.scheduler.passes > 0
