"""The page's question "what if": `dynamo simulate` on the recorded requests, in a process of low priority."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_local.config.planner import POLICIES
from dynamo_local.dashboard.collector import Collector, Length
from dynamo_local.dashboard.figures import cut
from dynamo_local.errors import BadInput, DynamoError, TimedOut
from dynamo_local.system.paths import write_private

HOURS_MAX = 24.0
DEADLINE_S = 600.0
KEPT = 8
OUTPUT_BYTES_MAX = 8 * 1024 * 1024
NICE = 15
PROGRESS = "progress"


def command(words: Sequence[str]) -> list[str]:
    """`dynamo WORDS` at low priority, whatever is on the path."""
    return ["nice", "-n", str(NICE), sys.executable, "-m", "dynamo_local.cli.main", *words]


async def begun(words: Sequence[str]) -> asyncio.subprocess.Process:
    """The process, in a session of its own."""
    return await asyncio.create_subprocess_exec(
        *command(words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=OUTPUT_BYTES_MAX,
        start_new_session=True,
    )


def end(process: asyncio.subprocess.Process) -> None:
    """Kill its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def finished(
    words: Sequence[str], deadline_s: float, progressed: Callable[[float], None] = lambda share: None
) -> str:
    """The output of a command that succeeded. `progressed` gets each share that it prints on stderr (`progress 0.37`).

    Raises `DynamoError` with its last words, or `TimedOut`.
    """
    process = await begun(words)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(deadline_s):
            out, err = await asyncio.gather(process.stdout.read(), _last_words(process.stderr, progressed))
            await process.wait()
    except TimeoutError:
        raise TimedOut(f"`dynamo {' '.join(words)}` took longer than {deadline_s:g} s and was ended") from None
    finally:
        if process.returncode is None:
            end(process)
            await process.wait()
    if process.returncode != 0:
        raise DynamoError(str(cut(err or f"exit code {process.returncode}")))
    return out.decode("utf-8", "replace")


async def _last_words(stream: asyncio.StreamReader, progressed: Callable[[float], None]) -> str:
    """Its last line that is none of progress."""
    last = ""
    async for raw in stream:
        line = raw.decode("utf-8", "replace").strip()
        name, _, share = line.partition(" ")
        if name == PROGRESS:
            with contextlib.suppress(ValueError):
                progressed(float(share))
        elif line:
            last = line
    return last


@dataclass(slots=True)
class WhatIf:
    """One run."""

    began_s: float
    task: asyncio.Task[None] | None = None
    state: str = "running"
    progress: float | None = None
    result: Any = None
    beside: dict[str, Any] | None = None
    error: str | None = None
    words: tuple[str, ...] = field(default=())


class WhatIfs:
    """Runs one at a time. The last ones are kept with their results."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._runs: dict[str, WhatIf] = {}

    async def begin(self, body: Mapping[str, Any]) -> str:
        """Its id. Raises `BadInput` for what cannot be run, or while another one runs."""
        if any(run.state == "running" for run in self._runs.values()):
            raise BadInput("another run is under way; cancel it, or wait for its end")
        state = self._collector.stream.state
        question = Question.of(body, state.get("targets") or {})
        lengths = self._collector.requests.lengths_since(time.time() - 3_600 * question.hours)
        if not lengths:
            raise BadInput(f"no request with its lengths was recorded in the last {question.hours:g} h")
        name = uuid.uuid4().hex[:12]
        trace = self._collector.paths.runtime / f"whatif-{name}.jsonl"
        await asyncio.to_thread(write_private, {trace: trace_lines(lengths)})
        gpus = max(1, len(state.get("gpus") or ()), sum(question.fleet or ()))
        run = self._runs[name] = WhatIf(time.monotonic(), words=question.words(str(trace), gpus))
        run.beside = await asyncio.to_thread(self._happened, question.hours, lengths)
        run.task = asyncio.create_task(self._run(run, trace), name="what-if")
        while len(self._runs) > KEPT:
            del self._runs[next(iter(self._runs))]
        return name

    def get(self, name: str) -> dict[str, Any] | None:
        """Its state, and its result beside what happened."""
        run = self._runs.get(name)
        if run is None:
            return None
        return {
            "state": run.state,
            "progress": run.progress,
            "seconds": round(time.monotonic() - run.began_s, 1) if run.state == "running" else None,
            "command": f"dynamo {' '.join(run.words)}",
            "result": run.result,
            "beside": run.beside,
            "error": run.error,
        }

    async def cancel(self, name: str) -> dict[str, Any] | None:
        """End it. One that has ended stays as it is."""
        run = self._runs.get(name)
        if run is not None and run.task is not None and run.state == "running":
            run.state = "cancelled"
            run.task.cancel()
            await asyncio.wait({run.task}, timeout=5.0)
        return self.get(name)

    async def close(self) -> None:
        """End all."""
        for name in list(self._runs):
            await self.cancel(name)

    def _happened(self, hours: float, lengths: Sequence[Length]) -> dict[str, Any]:
        """The real figures of that time, under the simulator's names."""
        judged = [row.kept for row in lengths if row.kept is not None]
        now_s = time.time()
        span = self._collector.reader.span(
            min(row.at_s for row in lengths), now_s, points=60, columns=["gpus_used"], now_s=now_s
        )
        used = [value for value in span.columns["gpus_used"] if value is not None]
        return {
            "requests": len(lengths),
            "attainment": round(sum(judged) / len(judged), 4) if judged else None,
            "gpu_hours": round(sum(used) * span.step_s / 3_600, 4) if used else None,
            "hours": hours,
        }

    async def _run(self, run: WhatIf, trace: Path) -> None:
        try:
            run.result = json.loads(await finished(run.words, DEADLINE_S, partial(setattr, run, "progress")))
            run.state = "done"
        except (DynamoError, OSError, ValueError) as error:
            run.state, run.error = "failed", str(cut(error))
        finally:
            await asyncio.to_thread(trace.unlink, missing_ok=True)


@dataclass(frozen=True, slots=True)
class Question:
    """The change to try: another policy, fleet (prefill, decode) or targets, on the requests of some hours."""

    hours: float
    policy: str | None
    fleet: tuple[int, int] | None
    targets: Mapping[str, float]

    @classmethod
    def of(cls, body: Mapping[str, Any], targets: Mapping[str, Any]) -> Question:
        """Parsed from the page's request. `targets` are those of the graph. Raises `BadInput`."""
        policy, fleet, hours = body.get("policy"), body.get("fleet"), body.get("hours", 1.0)
        if policy is not None and policy not in POLICIES:
            raise BadInput(f"policy is one of {', '.join(POLICIES)}")
        if not _number(hours) or not 0 < hours <= HOURS_MAX:
            raise BadInput(f"hours is a number up to {HOURS_MAX:g}")
        if fleet is not None and not _is_fleet(fleet):
            raise BadInput("fleet is [prefill workers, decode workers], such as [1, 2]")
        if policy is None and fleet is None:
            raise BadInput("say a policy or a fleet to try")
        other = body.get("targets")
        given = {**targets, **(other if isinstance(other, dict) else {})}
        known = {name: float(given[name]) for name in ("ttft_ms", "itl_ms") if _number(given.get(name))}
        return cls(float(hours), policy, None if fleet is None else (fleet[0], fleet[1]), known)

    def words(self, trace: str, gpus: int) -> tuple[str, ...]:
        """The words of `dynamo simulate`."""
        words = ["simulate", "--trace", trace, "--json", "--progress", "--jobs", "1", "--gpus", f"sim:{gpus}"]
        for name, value in self.targets.items():
            words += [f"--{name.removesuffix('_ms')}", f"{value:g}"]
        if self.fleet is not None:
            words += ["--initial" if self.policy else "--static", f"{self.fleet[0]},{self.fleet[1]}"]
        return (*words, *(("--policy", self.policy) if self.policy else ()))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_fleet(value: Any) -> bool:
    counts = value if isinstance(value, list) else []
    return len(counts) == 2 and all(type(each) is int and 0 <= each <= 512 for each in counts) and counts[1] > 0


def trace_lines(lengths: Iterable[Length]) -> str:
    """The requests in Mooncake's format, by arrival."""
    rows = sorted(lengths)
    first_s = rows[0].at_s if rows else 0.0
    return "".join(
        json.dumps({"timestamp": round(1e3 * (row.at_s - first_s)), "input_length": row.isl, "output_length": row.osl})
        + "\n"
        for row in rows
    )
