"""What if: `dynamo simulate` and `dynamo planner replay` on what was recorded, each in a process of low priority."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.dashboard.figures import cut
from dynamo_local.errors import BadInput, DynamoError, TimedOut
from dynamo_local.planner.records.ticks import tick_log_path
from dynamo_local.system.paths import Paths

POLICIES = ("load", "sla", "slo", "throughput-load")
DEADLINE_S = 600.0
KEPT = 8
OUTPUT_BYTES_MAX = 8 * 1024 * 1024
NICE = 15


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


async def finished(words: Sequence[str], deadline_s: float) -> str:
    """The output of a command that succeeded. Raises `DynamoError` with its last words, or `TimedOut`."""
    process = await begun(words)
    try:
        async with asyncio.timeout(deadline_s):
            out, err = await process.communicate()
    except TimeoutError:
        raise TimedOut(f"`dynamo {' '.join(words)}` took longer than {deadline_s:g} s and was ended") from None
    finally:
        if process.returncode is None:
            end(process)
            await process.wait()
    if process.returncode != 0:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        raise DynamoError(str(cut(lines[-1] if lines else f"exit code {process.returncode}")))
    return out.decode("utf-8", "replace")


@dataclass(slots=True)
class WhatIf:
    """One run."""

    began_s: float
    task: asyncio.Task[None] | None = None
    state: str = "running"
    result: Any = None
    error: str | None = None
    words: tuple[str, ...] = field(default=())


class WhatIfs:
    """Runs one at a time. The last ones are kept with their results."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._runs: dict[str, WhatIf] = {}

    async def begin(self, body: Mapping[str, Any]) -> str:
        """Its id. Raises `BadInput` for what cannot be run, or while another one runs."""
        if any(run.state == "running" for run in self._runs.values()):
            raise BadInput("another run is under way; cancel it, or wait for its end")
        words = self._words(body)
        name = uuid.uuid4().hex[:12]
        run = self._runs[name] = WhatIf(time.monotonic(), words=words)
        run.task = asyncio.create_task(self._run(run), name="what-if")
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
            "progress": None,
            "seconds": round(time.monotonic() - run.began_s, 1) if run.state == "running" else None,
            "command": f"dynamo {' '.join(run.words)}",
            "result": run.result,
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

    async def _run(self, run: WhatIf) -> None:
        try:
            run.result = json.loads(await finished(run.words, DEADLINE_S))
            run.state = "done"
        except (DynamoError, OSError, ValueError) as error:
            run.state, run.error = "failed", str(cut(error))

    def _words(self, body: Mapping[str, Any]) -> tuple[str, ...]:
        """`planner replay` of another policy on the planner's ticks."""
        policy = body.get("policy")
        if policy is not None and policy not in POLICIES:
            raise BadInput(f"policy is one of {', '.join(POLICIES)}")
        log = tick_log_path(self._paths.logs)
        if not log.exists():
            raise BadInput(f"nothing was recorded: a running planner writes {log}")
        words = ["planner", "replay", str(log), "--json"]
        if policy is not None:
            words += ["--policy", str(policy)]
            targets = body.get("targets") or {}
            for key, option in (("ttft_ms", "ttft"), ("itl_ms", "itl"), ("target", "target")):
                value = targets.get(key)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    words += ["--set", f"{option}={value:g}"]
        return tuple(words)
