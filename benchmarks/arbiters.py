"""The processes that `arbiter_idle` measures: `python -m benchmarks.arbiters ours|circus …`, and the workers' stand-in.

Both arbiters supervise `sleep`: 64 real workers would take 4 GB and say nothing more about who watches them.
*ours* is the process of `dynamo serve` itself, its whole command line, with only the workers' argv replaced. One
stand-in sends for all workers: a registration of each, with its real pid, in etcd. Once a second it answers the load
request for each. So everything runs that runs in production: the etcd watch, load sampling,
following 66 log files, statefile, control endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMESPACE = "bench"
ANSWER_TIMEOUT_S = 120.0


def sleeper() -> tuple[str, str]:
    """A process that costs nothing. FileNotFoundError where there is none."""
    path = shutil.which("sleep")
    if path is None:
        raise FileNotFoundError("no `sleep` on PATH")
    return path, "86400"


def ours(words: Sequence[str]) -> None:
    """`dynamo serve WORDS…`, with workers that only sleep."""
    from dynamo_local.arbiter import launch
    from dynamo_local.arbiter.deployment import WatcherFactory
    from dynamo_local.cli.main import main
    from dynamo_local.system.process_host import LaunchSpec

    class SleepersFactory(WatcherFactory):
        """Plans every worker as it would be, but for what it runs."""

        def plan(self, *args: Any) -> LaunchSpec:
            return dataclasses.replace(WatcherFactory.plan(self, *args), argv=sleeper())

    plan_deployment = launch.plan_deployment

    def with_sleepers(*args: Any) -> Any:
        deployment, *rest = plan_deployment(*args)
        made = {field.name: getattr(deployment.factory, field.name) for field in dataclasses.fields(WatcherFactory)}
        return dataclasses.replace(deployment, factory=SleepersFactory(**made)), *rest

    launch.plan_deployment = with_sleepers  # type: ignore[assignment]
    sys.argv = ["dynamo", "serve", *words]
    main()


async def stand_in(statefile: Path, watchers: int, changing: bool) -> None:
    """Register each worker and answer for its load until standard input closes. TimeoutError if they do not come."""
    from dynamo_local.core.types import Load, instance_key
    from dynamo_local.state.store import load
    from dynamo_local.transport.access import EtcdAccess, NatsAccess, run_environment
    from dynamo_local.transport.etcd import EtcdStore
    from dynamo_local.transport.lease import LeaseKeeper
    from dynamo_local.transport.load import LoadPublisher
    from dynamo_local.transport.nats import close_quietly, connect_nats

    state = await asyncio.to_thread(_spawned, statefile, watchers)
    env = run_environment(load(statefile))
    kv = await EtcdStore.connect_when_up(env["ETCD_ENDPOINTS"], ANSWER_TIMEOUT_S, access=EtcdAccess.of(env))
    nats = await connect_nats(env["NATS_SERVER"], NatsAccess.of(env), name="stand-in")
    keeper = LeaseKeeper(kv, is_draining=_never)
    lease = await keeper.start()
    load = Load(request_total_slots=256, kv_total_blocks=14766)

    def measured() -> Load:
        if not changing:
            return load
        active = int(time.monotonic()) % 200
        share = active / 256
        return dataclasses.replace(
            load, request_active_slots=active, kv_active_blocks=active * 50, gpu_cache_usage_perc=share
        )

    publishers = []
    for name, entry in state["components"].items():
        publisher = LoadPublisher(nats, NAMESPACE, entry["component"], name, lambda: lease, measured, _no_change)
        await publisher.start()
        publishers.append(publisher)
        endpoint = instance_key(NAMESPACE, entry["component"], "generate", lease)
        value = json.dumps({"pid": entry["pid"], "endpoints": [endpoint]}).encode()
        await kv.put(f"{NAMESPACE}/workers/{name}:{lease:x}", value, lease)
    await asyncio.to_thread(sys.stdin.read)
    for publisher in publishers:
        await publisher.close()
    await keeper.close()
    await close_quietly(nats)
    await kv.close()


async def _never() -> bool:
    return False


async def _no_change() -> None:
    await asyncio.Event().wait()


def _spawned(statefile: Path, watchers: int) -> dict[str, Any]:
    """The statefile once every worker in it has a pid. TimeoutError if that does not come."""
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if statefile.exists():
            state: dict[str, Any] = json.loads(statefile.read_text())
            entries = state["components"].values()
            if len(entries) == watchers and all(entry.get("pid") for entry in entries):
                return state
        time.sleep(0.05)
    raise TimeoutError(f"{statefile} did not show {watchers} workers with pids within {ANSWER_TIMEOUT_S:g} s")


async def circus(folder: Path, watchers: int) -> None:
    """A plain circus arbiter, as it comes, until standard input closes. Says `ready` on standard output."""
    from circus.arbiter import Arbiter
    from circus.watcher import Watcher
    from tornado.ioloop import IOLoop

    path, seconds = sleeper()
    arbiter = Arbiter(
        [Watcher(f"{NAMESPACE}_Worker_{n}", path, args=[seconds], singleton=True) for n in range(watchers)],
        f"ipc://{folder}/ctl",
        f"ipc://{folder}/pub",
        check_delay=1.0,
        multicast_endpoint=None,
        loop=IOLoop.current(),
    )
    await arbiter.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await arbiter.stop()


def main() -> None:
    """One of the three."""
    if sys.argv[1] == "ours":
        ours(sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("circus", "stand-in", "changing"))
    parser.add_argument("path", type=Path)
    parser.add_argument("watchers", type=int)
    options = parser.parse_args()
    if options.what == "circus":
        asyncio.run(circus(options.path, options.watchers))
    else:
        asyncio.run(stand_in(options.path, options.watchers, changing=options.what == "changing"))


if __name__ == "__main__":
    main()
