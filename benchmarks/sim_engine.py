"""What the simulated engine costs: CPU per token in real time, and how fast it is on a virtual clock.

    python benchmarks/sim_engine.py [--seconds 5] [--json]
    python benchmarks/sim_engine.py --trace conversation_trace.jsonl.gz   (Mooncake's format; scheduler only)

Targets: 5,000 tokens/s through one engine in real time under 15 % of a core; the Mooncake conversation trace
(12,031 requests, 4.1 M tokens) well under the 20 s that `dynamo simulate` has for it.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import heapq
import json
import time
from pathlib import Path
from typing import Any

from dynamo_local.clock import run_virtual
from dynamo_local.engines.sim import InMemoryTransport, ProfileModel, SimEngine, SimOptions, SimScheduler
from dynamo_local.engines.sim.requests import Finished, SchedulerConfig, SimRequest, Tokens
from dynamo_local.ports import EngineRequest, SamplingParams

PROMPT_TOKENS = 512
STREAMS = 64


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
    took["tokens_per_clock_s"] = took["tokens"] / took["clock_s"]
    took["tokens_per_cpu_s"] = took["tokens"] / took["cpu_s"]
    took["cpu_share_at_5000_tokens_per_s"] = 5000 / took["tokens_per_cpu_s"]
    return took


def replay(trace: Path, engines: int, block_size: int) -> dict[str, float]:
    """A trace through `engines` aggregated schedulers, in turn, by quiet runs: the shape of the twin's inner loop."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each measurement lasts on its own clock")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    result["real_time"] = asyncio.run(_load(SimOptions(), args.seconds))
    result["virtual_each_pass"] = run_virtual(_load(SimOptions(), args.seconds * 4))
    result["virtual_coalesced"] = run_virtual(_load(SimOptions(coalesce_passes=True), args.seconds * 20))
    if args.trace:
        result["trace"] = replay(args.trace, args.engines, args.block_size)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for name, values in result.items():
        print(name)
        for key, value in values.items():
            print(f"  {key:32} {value:12,.3f}")


if __name__ == "__main__":
    main()
