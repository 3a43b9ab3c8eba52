"""For tests of a planner on real processes: an open loop of requests, and whether all records tell the same story."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from benchmarks.drain.trace import Ask, asks
from benchmarks.traces import SINUSOID, generated
from dynamo_local.cli.common import ask_arbiter
from dynamo_local.planner.records.decision_log import decision_log_path, read
from tests.drivers.served import Served, auntil, expected, stream_chat

PERIOD_S = 150.0
"""Period of the generated sinusoid: from 5 requests per second up to 20 and back."""
PREFILL, DECODE = "PrefillWorker", "VllmWorker"
COMES = ("pending", "starting", "ready", "crashed", "backing_off")
LOOK_EVERY_S = 0.1
AGREE_WITHIN_S = 5.0
POLICY_WORDS = {
    "sla": ("--Planner.policy=sla",),
    "throughput-load": (
        "--Planner.policy=throughput-load",
        "--Planner.optimization-target=sla",
        "--Planner.enable-load-scaling=true",
        "--Planner.load-adjustment-interval-seconds=2",
    ),
}
"""The policies with targets, each as it is asked for on the command line."""


def one_period(*, thinning: int, speed: float, answer_max: int) -> list[Ask]:
    """A load that rises and falls once, in `PERIOD_S / speed` seconds."""
    found = asks(generated(SINUSOID).rows, thinning=thinning, speed=speed, answer_max=answer_max)
    return list(takewhile(lambda ask: ask.at_s < PERIOD_S / speed, found))


def steady(*, rate: float, seconds: float, prompt_words: int, tokens: int, ignore_eos: bool = True) -> list[Ask]:
    """So many requests a second, each of its own prompt."""
    count = int(rate * seconds)
    words = " the" * prompt_words
    return [Ask(n / rate, f"Number {n} of {rate:g}{words} {n}?", tokens, ignore_eos) for n in range(count)]


@dataclass(slots=True)
class Answers:
    """The outcome of a load's requests."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)


async def open_loop(served: Served, load: Iterable[Ask]) -> Answers:
    """Send each request at its time, whatever became of those before; every answer is checked, with its ending."""
    answers = Answers()
    began_s = time.monotonic()
    async with served.client() as http, asyncio.TaskGroup() as group:
        for ask in load:
            await asyncio.sleep(max(0.0, began_s + ask.at_s - time.monotonic()))
            group.create_task(_ask(http, ask, answers))
    return answers


async def _ask(http: Any, ask: Ask, answers: Answers) -> None:
    try:
        answer = await stream_chat(http, ask.prompt, ask.max_tokens, ignore_eos=ask.ignore_eos)
    except Exception as error:  # a failed request is a result here
        answers.wrong.append(f"{ask.prompt[:40]!r}: {type(error).__name__}: {error}")
        return
    if answer == expected(ask.prompt, ask.max_tokens, ignore_eos=ask.ignore_eos):
        answers.right += 1
    else:
        answers.wrong.append(f"{ask.prompt[:40]!r}: wrong answer, it ended by {answer[1]}")


def planner(served: Served, command: str, **properties: Any) -> dict[str, Any]:
    answer: dict[str, Any] = ask_arbiter(served.paths, f"dynamo_planner_{command}", 20.0, **properties)["planner"]
    return answer


def decided(served: Served) -> list[dict[str, Any]]:
    return [dict(record) for record in read(decision_log_path(served.paths.logs))]


def committed(records: Iterable[dict[str, Any]]) -> list[tuple[int, str, int]]:
    """`(number, component, -1 or +1)` of all steps that were carried out, in order."""
    return [
        (record["seq"], reason["component"], reason["step"])
        for record in records
        for reason in record["decision"]["reasons"]
        if record["outcomes"].get(reason["component"], {}).get("outcome") == "committed"
    ]


def capacity(served: Served) -> Counter[str]:
    """Workers that serve or will, by component, as the statefile says."""
    entries = served.statefile()["components"].values()
    counts = Counter(
        entry["component"]
        for entry in entries
        if entry["state"] in COMES or entry.get("course") in ("returning", "restarting")
    )
    return Counter({name: counts[name] for name in (PREFILL, DECODE)})


class Auditor:
    """Compares, all the time, what the decision log, the statefile and `circusctl list` say.

    `begins` are the workers before the first decision. `seen` counts workers by the number of steps that had been
    carried out when all agreed; `most` is the most GPUs that were held at once.
    """

    def __init__(self, served: Served) -> None:
        self.served = served
        self.begins = capacity(served)
        self.from_number = max((record["seq"] for record in decided(served)), default=0)
        self.seen: dict[int, Counter[str]] = {}
        self.most: Counter[str] = Counter()
        self.held_max = 0
        self.failed: str | None = None
        self.last_wrong: dict[int, str] = {}

    def steps(self) -> list[tuple[int, str, int]]:
        return committed(record for record in decided(self.served) if record["seq"] > self.from_number)

    def look(self) -> str | None:
        """None if all agree, else who says what."""
        steps = self.steps()
        should = Counter(self.begins)
        for _, component, step in steps:
            should[component] += step
        found = capacity(self.served)
        self.most |= found
        state = self.served.statefile()["components"]
        self.held_max = max(
            self.held_max, sum(len(entry["resources"].get("gpu_uuids", ())) for entry in state.values())
        )
        listed = set(ask_arbiter(self.served.paths, "list")["watchers"])
        runs = {name.lower() for name, entry in state.items() if entry.get("pid")}  # circus lists names so
        infra = {f"{self.served.namespace}_{name}" for name in ("etcd", "nats", "guardian")}
        if found != should:
            return f"after {len(steps)} steps the statefile has {dict(found)}, the decision log {dict(should)}"
        if not runs <= listed or not listed <= runs | infra | {name.lower() for name in state}:
            return f"the statefile has {sorted(runs)}, circus {sorted(listed)}"
        self.seen[len(steps)] = found
        return None

    async def run(self) -> None:
        """For ever. A disagreement may last as long as a commit takes to reach the log, no longer."""
        wrong_s: float | None = None
        while True:
            wrong = await asyncio.to_thread(self.look)
            now_s = time.monotonic()
            wrong_s = None if wrong is None else wrong_s or now_s
            if wrong is not None:
                self.last_wrong[len(self.steps())] = wrong
            if wrong_s is not None and now_s - wrong_s > AGREE_WITHIN_S:
                self.failed = self.failed or wrong
            await asyncio.sleep(LOOK_EVERY_S)

    def check(self) -> None:
        """They agreed at the beginning and at the end, and never disagreed for longer than a commit takes."""
        assert self.failed is None
        assert {0, len(self.steps())} <= set(self.seen), (self.seen, self.steps(), self.last_wrong)


@asynccontextmanager
async def audited(served: Served) -> AsyncIterator[Auditor]:
    """Look on during the block; at its end all must agree, and have agreed meanwhile."""
    auditor = Auditor(served)
    task = asyncio.create_task(auditor.run())
    try:
        yield auditor
        await auntil(lambda: auditor.look() is None, what=lambda: str(auditor.look()))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    auditor.check()
