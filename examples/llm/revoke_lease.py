"""Revoke a worker's lease: `python revoke_lease.py VllmWorker_1`. The worker drains, exits, and is not restarted.

That is all that another tool (a planner, an operator, `etcdctl lease revoke`) needs to take a worker out: the keys
go with the lease, so nothing is routed to it any more, and the worker finishes what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from dynamo_local.errors import DynamoError, UnknownWorker
from dynamo_local.state import State, load
from dynamo_local.state.raw import statefile_path
from dynamo_local.transport.access import EtcdAccess, run_environment
from dynamo_local.transport.etcd import EtcdStore


async def revoke(state: State, worker: str) -> str:
    """Revoke the lease of that worker; returns it, in hex. Raises `UnknownWorker` or `EtcdUnavailable`."""
    entry = state.components.get(worker) or state.components.get(f"{state.namespace}_{worker}")
    if entry is None or entry.lease is None:
        with_lease = sorted(name for name, other in state.components.items() if other.lease is not None)
        raise UnknownWorker(f"{worker} holds no lease; these workers do: {', '.join(with_lease) or 'none'}")
    env = {**os.environ, **run_environment(state)}
    store = await EtcdStore.connect(env["ETCD_ENDPOINTS"], access=EtcdAccess.of(env))
    try:
        await store.revoke(int(entry.lease, 16))
    finally:
        await store.close()
    return entry.lease


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker", help="as `dynamo status` shows it, with or without the namespace")
    parser.add_argument("--namespace", default="dynamo")
    args = parser.parse_args()
    try:
        state = load(statefile_path(args.namespace, os.environ))
        lease = asyncio.run(revoke(state, args.worker))
    except DynamoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"revoked lease {lease} of {args.worker}; it finishes what it streams (see `dynamo status`)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
