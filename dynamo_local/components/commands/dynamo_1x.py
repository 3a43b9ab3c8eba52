"""The runtime `dynamo-1x`: Dynamo 1.x's own frontend and workers, unchanged.

A worker of it registers itself in etcd, under a lease of its own: `v1/instances/<ns>/<component>/<endpoint>/<lease>`.
Taking the key of `generate` away takes it out of routing within milliseconds while its streams finish; the same value
under the same lease puts it back. SIGTERM is no drain on a real engine (its streams are cut), so it comes last.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.components.commands.child import Child
from dynamo_local.components.commands.config import CommandConfig
from dynamo_local.components.commands.dynamo_1x_env import HTTP_PORT, OWNED, RPC_PORT, SYSTEM_PORT
from dynamo_local.components.commands.dynamo_1x_events import (
    ForwardPasses,
    card_key,
    frontend_counters,
    limits_of,
    worker_counters,
)
from dynamo_local.components.commands.launch import DYNAMO_1X
from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.components.commands.probe import get_ok, wait_ok
from dynamo_local.components.commands.runner import ChildEnded, ChildSilent, CommandWorker, Sample, UnroutedDriver
from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.types import LEASE, Load, Missing, Role, lease_hex
from dynamo_local.errors import ConfigError, InfraUnavailable
from dynamo_local.ports import KeyValue, KeyValueStore
from dynamo_local.sdk.context import WorkerContext
from dynamo_local.system.log_files import tail
from dynamo_local.transport.fpm import decode_pass
from dynamo_local.transport.observation import MAX_PASSES, Benchmarked

# --- A Dynamo worker's own benchmark of its start, from its endpoint `get_perf_metrics`.
#
# vLLM's worker has an answer if it was started with `--benchmark-mode`; others have none, or no such endpoint:
#
#     {"results": [{"point": {"point_type": "prefill"}, "fpms": [{"wall_time": 0.01, "scheduled_requests": {…}}]}]}
#     {"status": "error", "message": "no benchmark data"}
#
# It is asked over Dynamo's own request plane, by Dynamo's own client in a process beside the worker (`asking`).

log = logging.getLogger("dynamo_local.worker")

ENDPOINT = "get_perf_metrics"
DEADLINE_S = 10.0
"""Within that it has registered the endpoint, and as long again it has to answer (seconds)."""
LOOK_EVERY_S = 0.2
SAID_MAX = 200
ANSWER_MAX = 16 * 1024 * 1024
POINTS = {
    Role.PREFILL: frozenset({"prefill"}),
    Role.DECODE: frozenset({"decode"}),
    Role.AGGREGATED: frozenset({"prefill", "decode"}),
}
"""Which of its points say what an engine of that role will do."""
ASKING = Path(__file__).with_name("dynamo_1x_client.py")
_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)?)?")


def python_of(argv: Sequence[str]) -> str | None:
    """The Python that a command runs by; None where it names none."""
    return next((word for word in argv if _PYTHON.fullmatch(os.path.basename(word))), None)


def passes_in(answer: bytes, role: Role, worker_id: str) -> Benchmarked:
    """The passes in an answer: those of the role's points, at most `MAX_PASSES`, evenly spread; or why there are none.

    An entry that is no pass (or a heartbeat) is left out.
    """
    try:
        answered = json.loads(answer)
    except (ValueError, RecursionError):
        return Missing(f"its {ENDPOINT} answers with what is no JSON")
    if not isinstance(answered, dict):
        return Missing(f"its {ENDPOINT} answers nothing that is known")
    if answered.get("status") == "error":
        return Missing(f"its {ENDPOINT} says: {str(answered.get('message'))[:SAID_MAX]}")
    found = [one for entry in _entries(answered, role) if (one := _pass(entry, worker_id)) is not None]
    if not found:
        return Missing(f"its {ENDPOINT} tells no pass of a worker with the role {role}")
    if len(found) > MAX_PASSES:
        found = [found[n * (len(found) - 1) // (MAX_PASSES - 1)] for n in range(MAX_PASSES)]
    return tuple(found)


def _entries(answered: Mapping[str, Any], role: Role) -> Iterable[Mapping[str, Any]]:
    for result in _listed(answered.get("results")):
        point = result.get("point")
        if isinstance(point, dict) and str(point.get("point_type")) in POINTS[role]:
            yield from _listed(result.get("fpms"))


def _listed(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _pass(entry: Mapping[str, Any], worker_id: str) -> ForwardPass | None:
    try:
        packed = msgspec.msgpack.encode({**entry, "worker_id": worker_id})
    except (TypeError, ValueError, OverflowError, RecursionError):  # a number of no size that it knows
        return None
    found = decode_pass(packed, exact=False)
    return None if found is None or found.heartbeat else found


class Benchmark:
    """One worker's, asked for when somebody wants it, and once: it does not change while the worker lives.

    `key` is the worker's key of its endpoint `generate` in the registry; `argv` and `env` are its command's.
    """

    def __init__(
        self, kv: KeyValueStore, key: str, path: str, role: Role, argv: Sequence[str], env: Mapping[str, str]
    ) -> None:
        head, _, self._lease = key.rpartition("/")
        self._key = f"{head.rpartition('/')[0]}/{ENDPOINT}/{self._lease}"
        self._kv = kv
        self._path = f"{path}.{ENDPOINT}"
        self._role = role
        self._argv = argv
        self._env = {name: value for name, value in env.items() if name not in OWNED}
        self._asking: asyncio.Task[Benchmarked] | None = None

    def result(self) -> Benchmarked | None:
        """None while it is being asked, which the first call of this begins."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="asking for the benchmark")
        return self._asking.result() if self._asking.done() else None

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _ask(self) -> Benchmarked:
        try:
            found = await self._answer() if await self._registered() else Missing(f"it has no endpoint {ENDPOINT}")
        except TimeoutError:
            found = Missing(f"its {ENDPOINT} has not answered within {DEADLINE_S:g} s")
        except (InfraUnavailable, OSError) as error:
            found = Missing(f"its {ENDPOINT} could not be asked: {error}")
        log.info("its own benchmark: %s", found.reason if isinstance(found, Missing) else f"{len(found)} passes")
        return found

    async def _registered(self) -> bool:
        """Whether it serves the endpoint, which it registers about when it registers `generate`."""
        end_s = asyncio.get_running_loop().time() + DEADLINE_S
        while await self._kv.get(self._key) is None:
            if asyncio.get_running_loop().time() >= end_s:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        return True

    async def _answer(self) -> Benchmarked:
        python = python_of(self._argv)
        if python is None:
            return Missing(f"its {ENDPOINT} cannot be asked: its command names no Python, in which Dynamo's client is")
        instance = str(int(self._lease, 16))
        words = (python, str(ASKING), self._path, instance, "etcd", self._env.get("DYN_REQUEST_PLANE", "tcp"))
        process = await asyncio.create_subprocess_exec(
            *words,
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                output, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = (said.decode("utf-8", "replace").strip().splitlines() or ["it says nothing"])[-1]
            return Missing(f"its {ENDPOINT} could not be asked: {last[:SAID_MAX]}")
        if len(output) > ANSWER_MAX:
            return Missing(f"its {ENDPOINT} answers {len(output):,} bytes, of which {ANSWER_MAX:,} are read at most")
        return await asyncio.to_thread(passes_in, output, self._role, instance)


INSTANCES = "v1/instances/"
SERVED_ENDPOINT = "generate"
WORKER_LABEL = "worker_id"
CARD_POLL_S = 0.02
_KEY = re.compile(
    rf"v1/instances/(?P<namespace>.+)/(?P<component>[^/]+)/(?P<endpoint>[^/]+)/(?P<lease>{LEASE.pattern})"
)
_TCP_PORT = re.compile(r"[^/]*:(\d{1,5})(?:/.*)?")
KV_USE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "dynamo_component_gpu_cache_usage_percent",
    "dynamo_component_kvstats_gpu_cache_usage_percent",
)
"""The share (0..1) of the KV cache in use, under the names that engines and Dynamo's versions give it."""
KV_BLOCKS = ("dynamo_component_total_blocks", "dynamo_component_kvstats_total_blocks")
NO_MODEL = "a model: it answers, but its /v1/models lists none"
NO_MODEL_EVERY_S = 1.0
"""It logs each question: asked at every turn, nothing else would be left in its log."""
HINDRANCE_AFTER_S = 1.0
"""A model is listed soon after its first worker has registered; what keeps it away is looked for after that."""
LOG_LINES, QUOTED = 200, 400
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL, _FAILED = re.compile(r"\b(?:ERROR|WARN(?:ING)?)\b.*"), re.compile(r".*\b[Ff]ailed\b.*")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")


class DynamoConfig(CommandConfig):
    """Keys of a section with `runtime: dynamo-1x`."""

    def check_envs(self, envs: Mapping[str, str]) -> None:
        for name in envs:
            if name in OWNED:
                raise ValueError(f"envs.{name} is set by dynamo serve itself; use `ports` for a fixed number")


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker's own key in Dynamo's registry."""

    key: str
    lease_id: int


def own_instance(kvs: Iterable[KeyValue], rpc_port: int, label: str | None) -> Registered | None:
    """Which of the registry's instances is the worker's that listens on that port; None while there is none.

    `label` is the lease (hex) that its metrics name. Raises `ConfigError` if the two disagree: then another
    process has its port, and the lease is not ours to revoke.
    """
    for kv in kvs:
        found = _KEY.fullmatch(kv.key)
        if found is None or found["endpoint"] != SERVED_ENDPOINT or _port_of(kv.value) != rpc_port:
            continue
        lease = found["lease"]
        if label is not None and label != lease:
            raise ConfigError(
                f"the instance at port {rpc_port} is registered under lease {lease}, but the worker there says that it "
                f"is {label}: two workers share a port"
            )
        return Registered(kv.key, int(lease, 16))
    return None


def _port_of(value: bytes) -> int | None:
    """The port of an instance's TCP transport; None if there is none or it is unreadable (others write there, too)."""
    try:
        transport = json.loads(value)["transport"]["tcp"]
    except (ValueError, KeyError, TypeError):
        return None
    found = _TCP_PORT.fullmatch(transport) if isinstance(transport, str) else None
    return None if found is None else int(found[1])


def worker_sample(text: str, queued_prefills: int | None = None) -> Sample:
    """The sample in a worker's metrics; `queued_prefills`, from its event plane, is used if they have no such number.

    Raises `ChildSilent` if they do not have the number of requests.
    """
    metrics = _parsed(text)
    in_flight = metrics.sum("dynamo_component_inflight_requests", dynamo_endpoint=SERVED_ENDPOINT)
    if in_flight is None:
        raise ChildSilent("its metrics have no dynamo_component_inflight_requests of the endpoint generate")
    reported, kv_use = metrics.first(*WAITING), metrics.first(*KV_USE)
    known = queued_prefills if reported is None else int(reported)
    waiting = known or 0
    load = Load(
        request_active_slots=max(0, int(in_flight) - waiting),
        num_requests_waiting=waiting,
        kv_total_blocks=int(metrics.first(*KV_BLOCKS) or metrics.label("num_gpu_blocks") or 0),
        gpu_cache_usage_perc=Missing("its metrics have no KV use") if kv_use is None else kv_use,
        prefills_waiting=known,
    )
    return Sample(load, in_flight=int(in_flight))


def frontend_sample(text: str) -> Sample:
    """The sample in the frontend's metrics. Before its first request it has no series for them: then none are open."""
    metrics = _parsed(text)
    open_, queued = (metrics.sum(f"dynamo_frontend_{name}_requests") for name in ("inflight", "queued"))
    pending = metrics.sum("dynamo_frontend_router_queue_pending_requests", worker_type="prefill")
    waiting = int(queued or 0)
    in_flight = int(open_ or 0)
    load = Load(
        request_active_slots=max(0, in_flight - waiting),
        num_requests_waiting=waiting,
        prefills_waiting=None if pending is None else int(pending),
    )
    return Sample(load, in_flight)


def _parsed(text: str) -> Metrics:
    try:
        return Metrics(text)
    except ValueError as error:
        raise ChildSilent(f"its metrics cannot be read: {error}") from None


def lists_model(text: str) -> bool:
    """Whether the answer of `/v1/models` names one."""
    try:
        return bool(json.loads(text)["data"])
    except (ValueError, KeyError, TypeError):
        return False


def hindrance(lines: Sequence[str]) -> str | None:
    """The last line of a frontend's log that says what went wrong, without its time and its colours."""
    for line in reversed(lines):
        plain = _COLOUR.sub("", line)
        found = _LEVEL.search(plain) or _FAILED.search(plain)
        if found is not None:
            text = " ".join(found[0].split())
            return text if len(text) <= QUOTED else text[: QUOTED - 1] + "…"
    return None


def own_log() -> list[str]:
    """The end of this worker's log, in which the command writes, too; empty where it goes elsewhere."""
    return tail(Path("/proc/self/fd/1"), LOG_LINES) if stat.S_ISREG(os.fstat(1).st_mode) else []


class WorkerDriver:
    """`base.Driver` of a decode, prefill or aggregated worker, or of any other that registers `generate`."""

    def __init__(self, context: WorkerContext, child: Child) -> None:
        self._kv = context.kv
        self._launch = child.launch
        self._rpc_port = child.launch.ports[RPC_PORT]
        self._system = f"http://127.0.0.1:{child.launch.ports[SYSTEM_PORT]}"
        self._context = context
        self._passes: ForwardPasses | None = None
        self._limits: Mapping[str, int | None] = {}
        self._counted: Mapping[str, float] = {}
        self._registered: Registered | None = None
        self._value: bytes | None = None

    async def wait_ready(self) -> None:
        await wait_ok(f"{self._system}/health")
        while True:
            label = _parsed(await self._metrics()).label(WORKER_LABEL)
            kvs, _revision = await self._kv.get_prefix(INSTANCES)
            self._registered = own_instance(kvs, self._rpc_port, label)
            if self._registered is not None:
                log.info("the command is registered as %s", self._registered.key)
                break
            await asyncio.sleep(CARD_POLL_S)
        await self._follow_passes(self._registered)

    async def _follow_passes(self, registered: Registered) -> None:
        context, found = self._context, _KEY.fullmatch(registered.key)
        if context.settings.role is Role.OTHER or found is None:
            return
        recorder: Any = await context.passes(publish=False)
        self._passes = ForwardPasses(
            context.nats, self._kv, recorder, found["namespace"], found["component"], registered.lease_id
        )
        await self._passes.start()
        context.vital(self._passes.follow_zmq(), "the passes")
        launch, role = self._launch, context.settings.role
        benchmark = Benchmark(
            self._kv, registered.key, f"{found['namespace']}.{found['component']}", role, launch.argv, launch.env
        )
        context.keep(benchmark.close)
        context.observe(self.counters, lambda: self._limits, benchmark=benchmark.result)

    def facts(self) -> Mapping[str, str]:
        return {} if self._registered is None else {"leases": lease_hex(self._registered.lease_id)}

    async def sample(self) -> Sample:
        heard = self._passes if self._context.settings.role is Role.PREFILL else None
        return worker_sample(await self._metrics(), None if heard is None else heard.queued)

    async def counters(self) -> Mapping[str, float]:
        """For planners. Looks at the card again, which may be written anew. Raises `ChildSilent`, `EtcdUnavailable`."""
        if self._registered is not None:
            card = await self._kv.get(card_key(self._registered.key))
            self._limits = {} if card is None else limits_of(card.value)
        self._counted = worker_counters(_parsed(await self._metrics()), self._counted)
        return self._counted

    async def _metrics(self) -> str:
        return await get_ok(f"{self._system}/metrics")

    async def take_out(self) -> None:
        """Save and delete the key. Checked again at each call: the worker itself may have put it back."""
        if self._registered is None:
            return
        found = await self._kv.get(self._registered.key)
        if found is not None:
            self._value = found.value
            await self._kv.delete(self._registered.key)

    async def put_back(self) -> None:
        """Raises `LeaseNotFound` where the worker's lease is gone: it cannot come back, and will end by itself."""
        if self._registered is not None and self._value is not None:
            await self._kv.put(self._registered.key, self._value, self._registered.lease_id)

    async def lost(self) -> None:
        if self._registered is not None:
            await self._kv.revoke(self._registered.lease_id)


class FrontendDriver(UnroutedDriver):
    """`base.Driver` of Dynamo's frontend: clients come to its port, so only its own drain takes it out of routing."""

    def __init__(self, context: WorkerContext, child: Child) -> None:
        self._context = context
        context.observe(self.counters)
        self._url = f"http://127.0.0.1:{child.launch.ports[HTTP_PORT]}"

    async def wait_ready(self) -> None:
        """Once it lists a model: before that every request gets 404, whatever its /health says."""
        await wait_ok(f"{self._url}/health")
        self._context.wait_for(NO_MODEL)
        pause_s, look_s = CARD_POLL_S, time.monotonic() + HINDRANCE_AFTER_S
        while not await self._lists_model():
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.2, NO_MODEL_EVERY_S)
            if time.monotonic() >= look_s and (said := hindrance(await asyncio.to_thread(own_log))) is not None:
                self._context.wait_for(f"{NO_MODEL}; its log says: {said}")

    async def _lists_model(self) -> bool:
        try:
            return lists_model(await get_ok(f"{self._url}/v1/models"))
        except ChildSilent:  # one slow answer is no reason to fail; its end would be noticed elsewhere
            return False

    def facts(self) -> Mapping[str, str]:
        return {"frontend_url": self._url}

    async def counters(self) -> Mapping[str, float]:
        """For planners. Raises `ChildSilent`."""
        return frontend_counters(_parsed(await get_ok(f"{self._url}/metrics")))

    async def sample(self) -> Sample:
        return frontend_sample(await get_ok(f"{self._url}/metrics"))


class DynamoWorker(CommandWorker):
    """A worker that is one of Dynamo 1.x's processes."""

    runtime = DYNAMO_1X

    def make_driver(self, context: WorkerContext, child: Child) -> WorkerDriver | FrontendDriver:
        config: DynamoConfig = context.settings
        return FrontendDriver(context, child) if config.role is Role.FRONTEND else WorkerDriver(context, child)

    async def drain(self) -> None:
        """A frontend drains by itself on SIGTERM: it answers 503 at once, finishes its streams, and ends. Waiting for a
        moment without requests could take as long as clients come."""
        if self.config.role is not Role.FRONTEND:
            await super().drain()
            return
        self.ending = True
        self.child.terminate()
        await self.child.wait()

    async def resume(self) -> None:
        """A frontend that was told to end cannot come back: its worker ends, and is started again."""
        if self.ending:
            self.context.vital(self._begin_anew(), "the frontend")
        else:
            await super().resume()

    async def _begin_anew(self) -> None:
        raise ChildEnded("Dynamo's frontend was told to end, and cannot take that back, so it is started anew")


CONFIG: Any = DynamoConfig
COMPONENT = DynamoWorker
