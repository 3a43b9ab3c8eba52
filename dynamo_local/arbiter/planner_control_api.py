"""Dynamo's control API of a planner, on a private socket: GET and PATCH `/v1/min-endpoints`.

A PATCH is checked like the configuration and takes effect as a whole or not at all, as `dynamo planner set` does.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.arbiter.planning import ArbiterPlanner
from dynamo_local.arbiter.tasks import Tasks
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.resolve import planned_components
from dynamo_local.core.secrets import parse_source
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import BadInput, ConfigError, DynamoError
from dynamo_local.system.key_files import ApiKeys

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from dynamo_local.components.openai.server import PrivateServer


# The floors depend on the policy. `throughput-load` has one for each role that it moves (`min_endpoint` in an
# aggregated graph). `sla` has one for both (`min_endpoint`). `load` has none besides `min_gpu_budget`.

FLOORS = ("min_endpoint", "prefill_min_endpoint", "decode_min_endpoint")
BUDGETS = ("min_gpu_budget", "max_gpu_budget")
OFF = -1


class BadRequest(BadInput):
    """The body is no JSON object, is empty, or names an unknown value."""

    code = "bad_request"


def mode_of(options: PlannerConfig, graph: GraphSpec) -> str:
    """The planned roles: `disagg`, `agg`, `prefill` or `decode`.

    Raises `ConfigError` for a graph that cannot be planned.
    """
    prefill, _ = planned_components(graph)
    chosen = options.mode if options.policy == "throughput-load" else None
    return chosen or ("agg" if prefill is None else "disagg")


def floors_of(options: PlannerConfig, graph: GraphSpec) -> dict[str, int]:
    """The floors that have an effect, by name."""
    mode = mode_of(options, graph)
    if options.policy == "load":
        return {}
    if options.policy in ("sla", "slo") or mode == "agg":
        return {"min_endpoint": options.min_endpoint}
    roles = ("prefill", "decode") if mode == "disagg" else (mode,)
    own = {role: getattr(options, f"{role}_min_endpoint") for role in roles}
    return {f"{role}_min_endpoint": options.min_endpoint if floor is None else floor for role, floor in own.items()}


def state_of(options: PlannerConfig, graph: GraphSpec) -> dict[str, Any]:
    """The mode, its floors, and both budgets (-1: off)."""
    given = options.policy != "throughput-load" or "min_gpu_budget" in options.model_fields_set
    budgets = {"min_gpu_budget": options.min_gpu_budget if given else OFF, "max_gpu_budget": options.max_gpu_budget}
    return {"mode": mode_of(options, graph), **floors_of(options, graph), **budgets}


def read_change(body: bytes) -> dict[str, Any]:
    """The requested changes by name. Raises `BadRequest`."""
    try:
        changes = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    known = (*FLOORS, *BUDGETS)
    if not isinstance(changes, dict) or not changes:
        raise BadRequest(f"say what to change: an object with any of {', '.join(known)}")
    unknown = sorted(set(changes) - set(known))
    if unknown:
        raise BadRequest(f"there is no {unknown[0][:100]!r}; there are: {', '.join(known)}")
    return changes


def checked(changes: Mapping[str, Any], options: PlannerConfig, graph: GraphSpec) -> dict[str, int]:
    """The changes, if each is a number and has an effect. Raises `BadInput`. Ranges are checked later."""
    floors, mode = floors_of(options, graph), mode_of(options, graph)
    for name, value in changes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadInput(f"{name} must be a whole number, not {json.dumps(value)[:100]}")
        if name in FLOORS and name not in floors:
            there = ", ".join((*floors, *BUDGETS))
            raise BadInput(f"{name} has no effect with the policy {options.policy} in mode {mode}; there are: {there}")
    return dict(changes)


log = logging.getLogger(__name__)

PATH = "/v1/min-endpoints"
BODY_MAX = 16 * 1024
DEADLINE_S = 10.0
"""A change that cannot begin within this time, because another one is under way, is refused."""


class ControlApi:
    """Serves from `start` to `stop`.

    `ready` raises `DynamoError` while the graph is not ready. With `api_key` a request must show a key, as a scrape
    must.
    """

    def __init__(
        self, planning: ArbiterPlanner, socket: Path, *, ready: Callable[[], None], api_key: str | None, tasks: Tasks
    ) -> None:
        self._planning = planning
        self._socket = socket
        self._ready = ready
        self._api_key = api_key
        self._tasks = tasks
        self._server: PrivateServer | None = None

    async def start(self) -> None:
        """Raises `ConfigError` if socket or keys are not available."""
        from dynamo_local.components.openai.access import ApiKeyMiddleware
        from dynamo_local.components.openai.server import PrivateServer

        app: Any = self
        if self._api_key is not None:
            source = parse_source(self._api_key)
            keys = ApiKeys.load(source, os.environ, option="Host.metrics-api-key")
            app = ApiKeyMiddleware(app, keys)
            if source.kind == "file":
                self._tasks.keep("API keys of the control API", keys.follow)
        self._server = PrivateServer(app, self._socket)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    @property
    def socket_files(self) -> tuple[Path, ...]:
        return () if self._server is None else self._server.socket_files

    async def renew_sockets(self) -> None:
        if self._server is not None:
            await self._server.renew_sockets()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from dynamo_local.components.openai.errors import ApiError
        from dynamo_local.components.openai.http_io import ClientGone, Reply, Whole, read_body

        headers = {}
        try:
            if scope["path"] != PATH:
                status, answer = 404, _error(f"there is only {PATH}")
            elif scope["method"] == "GET":
                status, answer = await self._answered(None)
            elif scope["method"] == "PATCH":
                status, answer = await self._answered(await read_body(scope, receive, BODY_MAX, lambda size: None))
            else:
                status, answer, headers = 405, _error("there are only GET and PATCH"), {"allow": "GET, PATCH"}
        except ClientGone:
            return
        except ApiError as error:
            text = f"the body has more than {BODY_MAX} bytes" if error.status == 413 else error.message
            status, answer = error.status, _error(text)
        await Reply(send).whole(Whole(status, json.dumps(answer).encode(), headers))

    async def _answered(self, body: bytes | None) -> tuple[int, dict[str, Any]]:
        planning = self._planning
        try:
            self._ready()
            if body is not None:
                change = checked(read_change(body), planning.options, planning.graph)
                await planning.set(change, within_s=DEADLINE_S)
            return 200, state_of(planning.options, planning.graph)
        except BadRequest as error:
            return 400, _error(str(error))
        except (BadInput, ConfigError) as error:
            return 422, _error(str(error))
        except DynamoError as error:
            return 503, _error(str(error))
        except TimeoutError:
            return 503, _error(f"another change is under way for {DEADLINE_S:g} s; nothing is changed, try again")


def _error(text: str) -> dict[str, Any]:
    return {"error": text}
