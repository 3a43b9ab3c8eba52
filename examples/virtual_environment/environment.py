"""An environment for a planner that decides and does not act: reads its decisions from etcd, carries them out, says so.

    dynamo serve graphs.disagg:Frontend -f configs/disagg.yaml --planner --Planner.environment=virtual
    python environment.py --etcd http://127.0.0.1:2379

The address of etcd stands in `dynamo status`. Here "carrying out" is `dynamo scale … --wait`: put your own orchestrator
in its place. Ctrl-C ends it; a decision that it was at stays unacknowledged, and is the first of its next run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from dynamo_local.errors import DynamoError
from dynamo_local.virtual import PlannerDecision, VirtualConnectorClient

TRY_AGAIN_S = 10.0


async def dynamo_scale(namespace: str, component: str, count: int) -> str | None:
    """Bring the component to so many workers, and wait until it is there. Why it could not be done; None if it was."""
    words = ("scale", component, f"={count}", "--wait", "--namespace", namespace)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynamo_local.cli.main", *words),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    return errors.decode(errors="replace").strip() if process.returncode else None


async def carry_out(decision: PlannerDecision, words: argparse.Namespace) -> str | None:
    """Both roles, one after the other. Why it could not be done; None if it was."""
    wanted = ((words.prefill, decision.num_prefill_workers), (words.decode, decision.num_decode_workers))
    for component, count in wanted:
        if component and count >= 0:  # -1: nothing was decided about it
            why = await dynamo_scale(words.namespace, component, count)
            if why is not None:
                return why
    return None


async def main(words: argparse.Namespace) -> None:
    """For ever: wait, get, carry out, complete."""
    undone: PlannerDecision | None = None
    async with VirtualConnectorClient(words.namespace, words.etcd, layout=words.keys) as client:
        while True:
            try:
                decision = await client.get() if await client.wait(TRY_AGAIN_S) else undone
                if decision is None:
                    continue
                undone = decision
                print(f"{decision}: begins", flush=True)
                why = await carry_out(decision, words)
                if why is None:
                    await client.complete(decision)
                    undone = None
                print(f"{decision}: {why or 'done'}", flush=True)
            except DynamoError as error:  # etcd is away, or what stands there is no decision: it is tried again
                print(f"environment: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--etcd", default=None, help="by default ETCD_ENDPOINTS, else http://127.0.0.1:2379")
    parser.add_argument("--keys", choices=["v1", "v0"], default="v1", help="v0: those of Dynamo up to 0.5")
    parser.add_argument("--prefill", default="PrefillWorker", help='the prefill component; "" if there is none')
    parser.add_argument("--decode", default="VllmWorker", help="the decode, or aggregated, component")
    try:
        asyncio.run(main(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(130)
