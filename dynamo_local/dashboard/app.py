"""The page's HTTP API: access is checked first, then the routes. docs/dashboard.md lists them."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import mimetypes
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_local import __version__
from dynamo_local.dashboard import sessions as rules
from dynamo_local.dashboard.acts import Acts
from dynamo_local.dashboard.collector import Collector, log_lines
from dynamo_local.dashboard.sessions import COOKIE, Session, Sessions
from dynamo_local.dashboard.stream import KEEP_ALIVE_S, UPDATE_EVERY_S, encoded, server_sent
from dynamo_local.dashboard.whatif import WhatIfs
from dynamo_local.errors import BadInput, DynamoError, NotRunning

STATIC = Path(__file__).parent / "static"
BODY_BYTES_MAX = 64 * 1024
VIEWERS_MAX = 64
OPEN_PATHS = frozenset({"/", "/api/session", "/favicon.ico"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Page:
    """The parts that the routes share."""

    namespace: str
    collector: Collector
    sessions: Sessions
    acts: Acts
    whatifs: WhatIfs
    base: str = ""
    read_only: bool = False
    secure: bool = False
    hosts: frozenset[str] = rules.LOOPBACK_NAMES
    clock: Callable[[], float] = time.monotonic
    assets: dict[str, Asset] = field(default_factory=dict)


class Refusal(Exception):
    """An answer other than success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON that no cache keeps."""
    more = {"cache-control": "no-store", **(headers or {})}
    return Response(encoded(value), status, more, "application/json")


def failed(error: Exception) -> Response:
    """The error's answer: 400 for the caller's own, 409 for a refusal, 503 where nothing runs."""
    if isinstance(error, Refusal):
        return as_json({"error": str(error)}, error.status)
    status = 400 if isinstance(error, BadInput) else 503 if isinstance(error, NotRunning) else 409
    return as_json({"error": str(error)}, status)


# --- access ----------------------------------------------------------------------------------------


class Access:
    """The checks before every route: `Host`, the session, and for what changes something `Origin` and the token."""

    def __init__(self, app: ASGIApp, page: Page) -> None:
        self._app = app
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        page = self._page
        path = scope["path"]
        if page.base and (path == page.base or path.startswith(f"{page.base}/")):
            path = path[len(page.base) :] or "/"  # the proxy in front may strip the prefix, or may not
        scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        request = Request(scope)
        try:
            scope["session"] = self._checked(request, path)
        except Refusal as refused:
            await failed(refused)(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _checked(self, request: Request, path: str) -> Session | None:
        page, headers = self._page, request.headers
        if not rules.host_fits(headers.get("host"), page.hosts):
            raise Refusal(421, "this server does not answer to that Host; open the URL that `dynamo dashboard` prints")
        session = page.sessions.find(request.cookies.get(COOKIE), page.clock())
        changes = request.method not in ("GET", "HEAD")
        if changes and not rules.origin_fits(headers.get("origin"), headers.get("host")):
            raise Refusal(403, "the request does not come from this page")
        if path in OPEN_PATHS or path.startswith("/assets/"):
            return session
        if session is None:
            raise Refusal(401, "no session: `dynamo dashboard --print-url` makes a new link")
        if changes and not rules.token_fits(session, headers.get("x-dynamo-token")):
            raise Refusal(403, "the request lacks the session's token; load the page again")
        if changes and page.read_only:
            raise Refusal(403, "this page is read-only (--read-only)")
        return session


def _with_headers(send: Send) -> Send:
    more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sending


# --- static ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page, compressed once."""

    body: bytes
    zipped: bytes
    kind: str
    tag: str


def load_assets(folder: Path = STATIC) -> dict[str, Asset]:
    """All files of the page by their name below the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            body = path.read_bytes()
            kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            if kind.startswith("text/") or kind.endswith(("javascript", "json")):
                kind += "; charset=utf-8"
            found[path.relative_to(folder).as_posix()] = Asset(
                body, gzip.compress(body, 9, mtime=0), kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            )
    return found


def _served(asset: Asset, request: Request) -> Response:
    """The file. A browser asks each time whether it changed, and mostly hears that it did not (304)."""
    headers = {"etag": asset.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.query_params.get("v"):
        headers["cache-control"] = "private, max-age=31536000, immutable"
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(asset.zipped, headers={**headers, "content-encoding": "gzip"}, media_type=asset.kind)
    return Response(asset.body, headers=headers, media_type=asset.kind)


async def index(page: Page, request: Request) -> Response:
    """The page itself. `{{base}}` and `{{version}}` in it are replaced."""
    asset = page.assets.get("index.html")
    if asset is None:
        raise Refusal(404, "the page's files are not installed")
    versions = hashlib.sha256("".join(each.tag for each in page.assets.values()).encode()).hexdigest()[:12]
    body = asset.body.replace(b"{{base}}", page.base.encode()).replace(b"{{version}}", versions.encode())
    return Response(body, headers={"cache-control": "no-cache"}, media_type=asset.kind)


async def asset(page: Page, request: Request) -> Response:
    """One file of the page."""
    found = page.assets.get(request.path_params["name"])
    if found is None:
        raise Refusal(404, "there is no such file")
    return _served(found, request)


# --- session -----------------------------------------------------------------------------------------


async def begin_session(page: Page, request: Request) -> Response:
    """Exchange the code (or, beyond this host, the password too) for a cookie."""
    body = await _body(request)
    code, password = body.get("code"), body.get("password")
    session = None
    if page.sessions.password is not None:
        session = page.sessions.log_in(password, page.clock()) if isinstance(password, str) else None
    elif isinstance(code, str):
        session = page.sessions.exchange(code, page.clock())
    if session is None:
        wants = "the password" if page.sessions.password is not None else "a new link"
        raise Refusal(401, f"that is wrong, used or too old; it needs {wants} (`dynamo dashboard --print-url`)")
    secure = "; Secure" if page.secure else ""
    cookie = f"{COOKIE}={session.cookie}; Path={page.base or '/'}; HttpOnly; SameSite=Strict{secure}"
    return Response(status_code=204, headers={"set-cookie": cookie, "cache-control": "no-store"})


async def session(page: Page, request: Request) -> Response:
    """About this session. Without one, 401 says whether a password is wanted."""
    found: Session | None = request.scope["session"]
    if found is None:
        wants = page.sessions.password is not None
        return as_json({"error": "no session: `dynamo dashboard --print-url` makes a new link", "password": wants}, 401)
    return as_json(
        {
            "namespace": page.namespace,
            "read_only": page.read_only,
            "token": found.token,
            "base": page.base,
            "version": __version__,
            "wall_s": time.time(),
            "zone": time.strftime("%Z (UTC%z)"),
            "history": page.collector.history_status(),
        }
    )


# --- what is shown -----------------------------------------------------------------------------------


async def stream(page: Page, request: Request) -> Response:
    """Server-sent events, from after the viewer's last one."""
    if page.collector.stream.viewers >= VIEWERS_MAX:
        raise Refusal(503, f"{VIEWERS_MAX} pages are open already; close one")
    after = request.headers.get("last-event-id") or request.query_params.get("after")
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(page, request, after), headers=headers, media_type="text/event-stream")


async def _events(page: Page, request: Request, after: str | None) -> AsyncIterator[bytes]:
    events, session = page.collector.stream, request.scope["session"]
    events.viewers += 1
    try:
        yield b"retry: 1000\n\n"
        while page.sessions.find(session.cookie, page.clock()) is not None:
            found = events.since(after)
            if found:
                after = found[-1][0]
                yield server_sent(found)
                await asyncio.sleep(UPDATE_EVERY_S)  # so that at most five updates a second go out
            elif not await events.wait(after or "", KEEP_ALIVE_S):
                yield b": keep-alive\n\n"
    finally:
        events.viewers -= 1


async def poll(page: Page, request: Request) -> Response:
    """The same events in one answer: for proxies that hold a stream back."""
    found = page.collector.stream.since(request.query_params.get("after"))
    rows = [f'{{"id":{encoded(name)},"event":{encoded(kind)},"data":{data}}}' for name, kind, data in found]
    return Response(
        f'{{"events":[{",".join(rows)}]}}', headers={"cache-control": "no-store"}, media_type="application/json"
    )


async def history(page: Page, request: Request) -> Response:
    """Points of a time, by columns."""
    from_s, to_s = _times(request)
    points = min(max(int(_number(request, "points", 1_000)), 1), 20_000)
    names = request.query_params.get("columns")
    columns = [name for name in names.split(",") if name][:100] if names else None
    read = partial(page.collector.reader.span, from_s, to_s, points=points, columns=columns, now_s=time.time())
    span = await asyncio.to_thread(read)
    body = encoded({"step_s": span.step_s, "columns": span.columns, "gaps": span.gaps}).encode()
    headers = {"cache-control": "no-store"}
    if "gzip" in request.headers.get("accept-encoding", "") and len(body) > 10_000:
        body, headers["content-encoding"] = await asyncio.to_thread(gzip.compress, body, 5), "gzip"
    return Response(body, headers=headers, media_type="application/json")


async def marks(page: Page, request: Request) -> Response:
    """Marks of a time."""
    from_s, to_s = _times(request)
    return as_json({"marks": await asyncio.to_thread(page.collector.marks, from_s, to_s)})


async def requests(page: Page, request: Request) -> Response:
    """The latest, slowest or failed requests; or those of an id."""
    query = request.query_params
    limit = min(max(int(_number(request, "limit", 100)), 1), 500)
    kind = query.get("kind", "latest")
    if kind not in ("latest", "slowest", "failed"):
        raise Refusal(400, "kind is latest, slowest or failed")
    found = page.collector.requests.found(kind=kind, limit=limit, request_id=query.get("id"))
    return as_json({"requests": found})


async def logs(page: Page, request: Request) -> Response:
    """Lines of a worker's log after an offset; without one, its end."""
    path = page.collector.log_file_of(request.path_params["worker"])
    if path is None:
        raise Refusal(404, "the graph has no worker of that name")
    after = request.query_params.get("after")
    offset, lines = await asyncio.to_thread(
        log_lines, path, None if after is None else int(_number(request, "after", 0))
    )
    return as_json({"offset": offset, "lines": lines})


# --- what changes something ----------------------------------------------------------------------------


async def act(page: Page, request: Request) -> Response:
    """An act, or what it would do."""
    return as_json(await page.acts.run(await _body(request)))


async def begin_whatif(page: Page, request: Request) -> Response:
    """Begin a what-if."""
    return as_json({"id": await page.whatifs.begin(await _body(request))}, 202)


async def whatif(page: Page, request: Request) -> Response:
    """A what-if's state; with DELETE, its end."""
    name = request.path_params["name"]
    found = await page.whatifs.cancel(name) if request.method == "DELETE" else page.whatifs.get(name)
    if found is None:
        raise Refusal(404, "there is no such run; it may have been forgotten")
    return as_json(found)


async def _body(request: Request) -> dict[str, Any]:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > BODY_BYTES_MAX:
            raise Refusal(413, f"a request has {BODY_BYTES_MAX} bytes at most")
    try:
        body = json.loads(bytes(found) or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refusal(400, "the request's body is no JSON object")
    return body


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = float("nan")
    if not -1e13 < value < 1e13:
        raise Refusal(400, f"{name} is a number, not {str(text)[:40]!r}")
    return value


def _times(request: Request) -> tuple[float, float]:
    to_s = _number(request, "to", time.time())
    return _number(request, "from", to_s - 3_600), to_s


Handler = Callable[[Page, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/", ("GET",), index),
    ("/assets/{name:path}", ("GET",), asset),
    ("/api/session", ("POST",), begin_session),
    ("/api/session", ("GET",), session),
    ("/api/stream", ("GET",), stream),
    ("/api/poll", ("GET",), poll),
    ("/api/history", ("GET",), history),
    ("/api/marks", ("GET",), marks),
    ("/api/requests", ("GET",), requests),
    ("/api/logs/{worker}", ("GET",), logs),
    ("/api/acts", ("POST",), act),
    ("/api/whatif", ("POST",), begin_whatif),
    ("/api/whatif/{name}", ("GET", "DELETE"), whatif),
)


def build_app(page: Page) -> ASGIApp:
    """The application."""

    async def not_found(_: Request, __: Exception) -> Response:
        return as_json({"error": "there is nothing at this address"}, 404)

    routes = [Route(path, _answering(page, handler), methods=list(methods)) for path, methods, handler in ROUTES]
    return Access(Starlette(routes=routes, exception_handlers={404: not_found}), page)


def _answering(page: Page, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await handler(page, request)
        except (Refusal, DynamoError) as error:
            return failed(error)

    return answer
