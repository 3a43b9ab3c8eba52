"""What a Dynamo worker has measured of itself at its start, by its endpoint `get_perf_metrics`.

vLLM's worker has an answer if it was started with `--benchmark-mode`; others have none, or no such endpoint:

    {"results": [{"point": {"point_type": "prefill"}, "fpms": [{"wall_time": 0.01, "scheduled_requests": {…}}]}]}
    {"status": "error", "message": "no benchmark data"}

It is asked over Dynamo's own request plane, by Dynamo's own client in a process beside the worker (`asking`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.commands.dynamo_1x.env import OWNED
from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.types import Missing, Role
from dynamo_local.errors import InfraUnavailable
from dynamo_local.ports import KeyValueStore
from dynamo_local.runtime.observation import MAX_PASSES, Benchmarked
from dynamo_local.runtime.passes.fpm import decode_pass

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
ASKING = Path(__file__).with_name("asking.py")
_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)?)?")


def python_of(argv: Sequence[str]) -> str | None:
    """The Python that a command runs by; None where it names none."""
    return next((word for word in argv if _PYTHON.fullmatch(os.path.basename(word))), None)


def passes_in(answer: bytes, role: Role, worker_id: str) -> Benchmarked:
    """The passes in an answer: those of the role's points, at most `MAX_PASSES`, evenly spread; or why there are none.

    An entry that is no pass (or a heartbeat) is left out.
    """
    try:
        told = json.loads(answer)
    except (ValueError, RecursionError):
        return Missing(f"its {ENDPOINT} answers with what is no JSON")
    if not isinstance(told, dict):
        return Missing(f"its {ENDPOINT} answers nothing that is known")
    if told.get("status") == "error":
        return Missing(f"its {ENDPOINT} says: {str(told.get('message'))[:SAID_MAX]}")
    found = [one for entry in _entries(told, role) if (one := _pass(entry, worker_id)) is not None]
    if not found:
        return Missing(f"its {ENDPOINT} tells no pass of a worker with the role {role}")
    if len(found) > MAX_PASSES:
        found = [found[n * (len(found) - 1) // (MAX_PASSES - 1)] for n in range(MAX_PASSES)]
    return tuple(found)


def _entries(told: Mapping[str, Any], role: Role) -> Iterable[Mapping[str, Any]]:
    for result in _listed(told.get("results")):
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

    def told(self) -> Benchmarked | None:
        """None while it is being asked, which the first call of this begins."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._asked(), name="asking for the benchmark")
        return self._asking.result() if self._asking.done() else None

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _asked(self) -> Benchmarked:
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
