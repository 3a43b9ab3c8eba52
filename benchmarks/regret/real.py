"""`python -m benchmarks.regret.real [--family NAME] [--seed N] [--compress N]`: a load through real processes.

The graph is `graphs.disagg` with sim engines, `slo` plans, and this process sends the requests at their times. The same
load, compressed as much, goes through the simulator ten times, each time with other small shifts of the arrivals.
Exit code 1: the real share or the real GPU-hours lie outside of the spread of these runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from benchmarks.deployment import Running, served
from benchmarks.regret.families import Load, load_of
from benchmarks.regret.frontier import Row, Runs
from benchmarks.regret.report import maker_of, say
from dynamo_local.simulator.options import Slo
from dynamo_local.simulator.trace import TraceRequest
from dynamo_local.state.store import load as load_state
from dynamo_local.system.executors import process_pool
from dynamo_local.system.paths import Paths

RUNS = 10
SHIFT_S = 0.5
"""Each arrival of a simulated run is shifted by so much at most."""
WATCHED_EVERY_S = 1.0
REQUEST_TIMEOUT_S = 600.0
PROCESS_S = 1.5
"""A worker's process starts in so long, beside its engine."""
TOKENS = 2000
"""Token ids of prompts are below this."""
MODEL = "sim-tiny"


@dataclass(frozen=True, slots=True)
class Told:
    """A request as its client saw it: seconds. `error`: why it has no whole answer."""

    at_s: float
    ttft_s: float | None = None
    itl_s: float | None = None
    error: str = ""

    def within(self, slo: Slo) -> bool:
        """Whether it kept both targets."""
        if self.error or self.ttft_s is None:
            return False
        return self.ttft_s * 1000 <= slo.ttft_ms and (self.itl_s or 0.0) * 1000 <= slo.itl_ms


def compressed(load: Load, times: float) -> Load:
    """The load in less time: engines and starts are as much faster, and targets as much shorter."""
    slo = replace(load.slo, ttft_ms=load.slo.ttft_ms / times, itl_ms=load.slo.itl_ms / times)
    requests = tuple(replace(each, at_s=each.at_s / times) for each in load.requests)
    return replace(load, requests=requests, slo=slo, speed=load.speed * times, start_up_s=load.start_up_s / times)


def config_of(load: Load, port: int) -> dict[str, Any]:
    """The configuration of `graphs.disagg` under which the load is served."""
    workers = dict(zip(("PrefillWorker", "VllmWorker"), load.first, strict=True))
    # The engine divides by its speed. The process itself needs some time before its engine.
    sim = {"speed": load.speed, "start_up_s": max(0.0, load.start_up_s - PROCESS_S) * load.speed}
    parts: dict[str, Any] = {
        name: {"common-configs": ["model", "sim"], "ServiceArgs": {"workers": count, "resources": {"gpu": 1}}}
        for name, count in workers.items()
    }
    parts["VllmWorker"] |= {"remote-prefill": True, "conditional-disagg": False}
    return {
        "Common": {"model": MODEL, "sim": sim},
        "Host": {"gpus": f"sim:{load.cap}"},
        "Frontend": {"port": port, "served-model-name": MODEL},
        "Processor": {"common-configs": ["model"]},
        "Planner": {
            "policy": "slo",
            "ttft": load.slo.ttft_ms,
            "itl": load.slo.itl_ms,
            "max-gpu-budget": load.cap,
        },
        **parts,
    }


async def _asked(client: httpx.AsyncClient, url: str, each: TraceRequest, began_s: float, rng: Random) -> Told:
    await asyncio.sleep(max(0.0, began_s + each.at_s - time.monotonic()))
    body = {
        "model": MODEL,
        "prompt": [rng.randrange(TOKENS) for _ in range(each.input_length)],
        "max_tokens": each.output_length,
        "ignore_eos": True,
        "stream": True,
    }
    sent_s, first_s, last_s = time.monotonic(), None, 0.0
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                return Told(each.at_s, error=f"{answer.status_code} {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    last_s = time.monotonic()
                    first_s = first_s or last_s
                elif line == "data: [DONE]":
                    break
            else:
                return Told(each.at_s, error="the stream was cut")
    except httpx.HTTPError as error:
        return Told(each.at_s, error=f"{type(error).__name__}: {error}")
    if first_s is None:
        return Told(each.at_s, error="no token came")
    gaps = each.output_length - 1
    return Told(each.at_s, first_s - sent_s, (last_s - first_s) / gaps if gaps else None)


async def _watched(running: Running, found: list[tuple[float, int]], began_s: float, until_s: float) -> None:
    """Moments and the GPUs that workers hold then, by the statefile."""
    statefile = Paths.of(running.status["namespace"], running.folders.env).statefile
    while (now_s := time.monotonic() - began_s) < until_s:
        workers = load_state(statefile).components.values()
        found.append((now_s, len({gpu for each in workers for gpu in each.resources.allocated_gpus or ()})))
        await asyncio.sleep(WATCHED_EVERY_S)


async def _played(running: Running, load: Load) -> tuple[list[Told], float]:
    """The requests as their clients saw them, and the GPU-hours."""
    began_s, held = time.monotonic() + 1.0, list[tuple[float, int]]()
    rng, end_s = Random(load.seed), load.requests[-1].at_s
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        watching = asyncio.create_task(_watched(running, held, began_s, end_s))
        telling = asyncio.create_task(_telling(load, began_s))
        asked = [asyncio.create_task(_asked(client, running.url, each, began_s, rng)) for each in load.requests]
        told = await asyncio.gather(*asked)
        await watching
        telling.cancel()
    ends = [at_s for at_s, _ in held[1:]] + [end_s]
    return told, sum(gpus * (end - at_s) for (at_s, gpus), end in zip(held, ends, strict=True)) / 3600


async def _telling(load: Load, began_s: float) -> None:
    while True:
        await asyncio.sleep(300)
        say(f"{time.monotonic() - began_s:.0f} of {load.requests[-1].at_s:.0f} s are over")


def shifted(load: Load, number: int) -> Load:
    """The load with other small shifts of its arrivals."""
    rng = Random(f"shift {number}")
    moved = [replace(each, at_s=max(0.0, each.at_s + rng.uniform(-SHIFT_S, SHIFT_S))) for each in load.requests]
    return replace(load, requests=tuple(sorted(moved, key=lambda each: each.at_s)))


def simulated_row(load: Load, number: int) -> Row:
    """One run of the simulator; `number` 0 has no shifts."""
    here = shifted(load, number) if number else load
    maker, first = maker_of(here, "slo")
    return Runs(here).kept("slo", first, "", maker)


def main(words: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret.real", description=__doc__)
    parser.add_argument("--family", default="lulls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=3.0, help="of the load, before it is compressed")
    parser.add_argument("--compress", type=float, default=3.0, metavar="N", help="hours of the load in one hour")
    parser.add_argument("--runs", type=int, default=RUNS, help="of the simulator")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(words)
    load = compressed(load_of(options.family, options.seed, options.hours), options.compress)
    say(f"{load.name}: {len(load.requests)} requests in {load.requests[-1].at_s:.0f} s, {load.slo}")
    with served("graphs.disagg:Frontend", config_of(load, port=0)) as running:
        told, hours = asyncio.run(_played(running, load))
    share = sum(each.within(load.slo) for each in told) / len(told)
    failed = [each for each in told if each.error]
    with process_pool(2) as pool:
        rows = list(pool.map(partial(simulated_row, load), range(options.runs)))
    shares, held = sorted(row.share() for row in rows), sorted(row.gpu_hours() for row in rows)
    print(f"real: {share:.2%} @ {hours:.2f} GPU-hours, {len(failed)} of {len(told)} failed")
    for name, figures, form in (("share", shares, ".2%"), ("GPU-hours", held, ".2f")):
        low, middle, high = (format(each, form) for each in (figures[0], median(figures), figures[-1]))
        print(f"simulated {len(rows)} times, {name}: {low} to {high}, median {middle}")
    for each in failed[:5]:
        print(f"failed at {each.at_s:.1f} s: {each.error}")
    if options.json is not None:
        told_rows = [asdict(row) for row in rows]
        options.json.write_text(json.dumps({"share": share, "gpu_hours": hours, "simulated": told_rows}))
    inside = shares[0] <= share <= shares[-1] and held[0] <= hours <= held[-1]
    return 0 if inside and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
