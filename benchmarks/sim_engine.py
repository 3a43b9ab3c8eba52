"""The cost of the simulated engine: CPU per token in real time, and how fast it is on a virtual clock.

    python -m benchmarks.sim_engine TRACE    (Mooncake's format, .jsonl or .jsonl.gz; the scheduler alone)

Targets: 5,000 tokens/s through one engine in real time under 15 % of a core. An hour of a chat service
(some 12,000 requests, 4.1 M tokens) takes well under the 20 s that `dynamo simulate` has for it.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import heapq
import json
import time
from pathlib import Path

from benchmarks.harness import Report, at_most
from dynamo_local.clock import run_virtual
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.requests import Finished, SchedulerConfig, SimRequest, Tokens
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.engines.sim.transfers import InMemoryTransport
from dynamo_local.ports import EngineRequest, SamplingParams
from dynamo_local.profile.interpolation import ProfileModel

PROMPT_TOKENS = 512
STREAMS = 64
CPU_TARGET_PERCENT = 15.0


def run(short: bool) -> Report:
    """Real time, and two ways to run on a virtual clock."""
    report = Report("sim_engine")
    seconds, rounds = (0.5, 1) if short else (5.0, 3)
    quiet = SimOptions(coalesce_passes=True)
    real = [asyncio.run(_load(SimOptions(), seconds)) for _ in range(rounds)]
    each = [run_virtual(_load(SimOptions(), seconds * 4)) for _ in range(rounds)]
    runs = [run_virtual(_load(quiet, seconds * 20)) for _ in range(rounds)]
    what = f"real time, {STREAMS} streams"
    report.add(f"{what}: tokens/s", "1/s", (r["tokens"] / r["clock_s"] for r in real))
    percent = (5000 / (r["tokens"] / r["cpu_s"]) * 100 for r in real)
    report.add(f"{what}: CPU at 5,000 tokens/s", "% core", percent, at_most(CPU_TARGET_PERCENT))
    report.add("virtual clock, every pass: tokens per CPU second", "1/s", (r["tokens"] / r["cpu_s"] for r in each))
    report.add("virtual clock, quiet runs: tokens per CPU second", "1/s", (r["tokens"] / r["cpu_s"] for r in runs))
    return report


async def _stream(engine: SimEngine, number: int, tokens: int) -> int:
    prompt = [number % 50_000, *range(PROMPT_TOKENS - 1)]
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    count = 0
    async for output in engine.generate(EngineRequest(str(number), prompt, sampling)):
        count += len(output.token_ids)
    return count


async def _load(options: SimOptions, seconds: float) -> dict[str, float]:
    """`STREAMS` endless streams for so long (of the loop's time)."""
    engine = SimEngine(options, transport=InMemoryTransport())
    await engine.start()
    loop = asyncio.get_running_loop()
    started_s, wall_s, cpu_s = loop.time(), time.perf_counter(), time.process_time()
    tokens = 0

    async def client(first: int) -> None:
        nonlocal tokens
        number = first
        while loop.time() < started_s + seconds:
            count = await _stream(engine, number, 256)
            tokens += count
            number += STREAMS

    async with asyncio.TaskGroup() as group:
        for first in range(STREAMS):
            group.create_task(client(first))
    took = {
        "tokens": tokens,
        "clock_s": loop.time() - started_s,
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
    }
    await engine.close()
    return took


def replay(trace: Path, engines: int, block_size: int) -> dict[str, float]:
    """A trace through `engines` aggregated schedulers in turn, as in the inner loop of the simulator."""
    started_s = time.perf_counter()
    perf = ProfileModel.load(SimOptions().profile)
    config = SchedulerConfig(perf.max_kv_tokens // block_size, block_size)
    schedulers = [SimScheduler(config, perf) for _ in range(engines)]
    data = trace.read_bytes()
    rows = [json.loads(line) for line in (gzip.decompress(data) if trace.suffix == ".gz" else data).splitlines()]
    heap: list[tuple[float, int]] = []
    tokens = finished = 0
    per_hash = 512 // block_size

    def drain(index: int, now_s: float) -> None:
        nonlocal tokens, finished
        for event in schedulers[index].advance(now_s):
            if isinstance(event, Tokens):
                tokens += len(event.times_s)
            elif isinstance(event, Finished):
                finished += 1
        at_s = schedulers[index].next_event_at(quiet=True)
        if at_s is not None:
            heapq.heappush(heap, (at_s, index))

    for number, row in enumerate(rows):
        now_s = row["timestamp"] / 1000
        while heap and heap[0][0] <= now_s:
            at_s, index = heapq.heappop(heap)
            drain(index, at_s)
        length = row["input_length"]
        keys = [(h, part) for h in row["hash_ids"] for part in range(per_hash)][: length // block_size]
        request = SimRequest(
            str(number), length, row["output_length"], max_output_tokens=row["output_length"], block_keys=keys
        )
        index = number % engines
        schedulers[index].submit(request, now_s)
        drain(index, now_s)
    while heap:
        at_s, index = heapq.heappop(heap)
        drain(index, at_s)
    wall_s = time.perf_counter() - started_s
    return {
        "requests": finished,
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_wall_s": tokens / wall_s,
        "passes": sum(scheduler.passes for scheduler in schedulers),
        "preemptions": sum(scheduler.preemptions for scheduler in schedulers),
        "block_size": block_size,
    }


def main() -> None:
    """Replay one trace."""
    parser = argparse.ArgumentParser(description="Replay a trace through simulated schedulers")
    parser.add_argument("trace", type=Path, help="in Mooncake's format")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=64)
    options = parser.parse_args()
    for key, value in replay(options.trace, options.engines, options.block_size).items():
        print(f"{key:32} {value:12,.3f}")


if __name__ == "__main__":
    main()
