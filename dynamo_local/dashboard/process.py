"""The page's process: what it serves, where it listens, and its life beside the run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from dynamo_local.components.openai.server import HttpServer, PrivateServer, Tls, bind_socket
from dynamo_local.components.openai.settings import is_loopback
from dynamo_local.core.gpus import GpuProcess
from dynamo_local.core.types import Missing
from dynamo_local.dashboard import sessions as rules
from dynamo_local.dashboard.acts import Acts
from dynamo_local.dashboard.app import Page, build_app, load_assets
from dynamo_local.dashboard.collector import Collector, open_request_socket
from dynamo_local.dashboard.sessions import Sessions
from dynamo_local.dashboard.whatif import WhatIfs
from dynamo_local.errors import ConfigError, DynamoError, NotRunning
from dynamo_local.system.paths import Paths

log = logging.getLogger(__name__)

ASK_S = 5.0
LOOK_EVERY_S = 1.0
GONE_FOR_S = 3.0
"""The run's statefile is missing for so long: the run has ended."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Where and how the page is served. `port` None: no page, the history alone."""

    namespace: str
    host: str = "127.0.0.1"
    port: int | None = 0
    base: str = ""
    cert: str | None = None
    key: str | None = None
    password_file: str | None = None
    names: tuple[str, ...] = ()
    read_only: bool = False
    history: bool = True
    with_run: bool = False
    """The arbiter started it: it ends when the run does."""

    def checked(self) -> Settings:
        """The settings, or `ConfigError` where strangers could look in."""
        if bool(self.cert) != bool(self.key):
            raise ConfigError("--cert and --key belong together; give both")
        if self.base and (not self.base.startswith("/") or self.base.endswith("/") or "//" in self.base):
            raise ConfigError(f"--base-path {self.base}: it begins with / and does not end with one, such as /dynamo")
        if not is_loopback(self.host) and not (self.cert and self.password_file):
            raise ConfigError(
                f"--listen {self.host}: others than this host can reach it; that needs --cert, --key and "
                "--password-file, or listen on 127.0.0.1 (and use `ssh -L`)"
            )
        return self


def password_of(path: str | None) -> str | None:
    """The password, from a file that only its owner can read. Raises `ConfigError`."""
    if path is None:
        return None
    try:
        if os.stat(path).st_mode & 0o077:
            raise ConfigError(f"--password-file {path}: others can read it; `chmod 600 {path}`")
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--password-file {path} cannot be read: {error}") from None
    if len(text) < 8:
        raise ConfigError(f"--password-file {path}: a password has at least 8 characters, this one {len(text)}")
    return text


class DashboardProcess:
    """Serves until told to stop, or until the run has ended."""

    def __init__(self, settings: Settings, paths: Paths) -> None:
        self._settings = settings
        self._paths = paths
        self.sessions = Sessions(password_of(settings.password_file))
        self.collector = Collector(
            paths,
            history=settings.history,
            devices=Devices().look,
            on_new_run=self.sessions.clear,
            url=lambda: None if self._server is None else self.url,
        )
        self._whatifs = WhatIfs(self.collector)
        self._server: HttpServer | None = None
        self._stop = asyncio.Event()

    @property
    def url(self) -> str:
        """Where the page is, without a code."""
        assert self._server is not None
        host, port = self._sock.getsockname()[:2]
        shown = self._settings.names[0] if self._settings.names else f"[{host}]" if ":" in host else host
        return f"{'https' if self._settings.cert else 'http'}://{shown}:{port}{self._settings.base}/"

    def link(self) -> str:
        """The page's URL with a new one-time code in its fragment."""
        if self.sessions.password is not None:
            return self.url
        return f"{self.url}#code={self.sessions.new_code(time.monotonic())}"

    def stop(self) -> None:
        """Ask it to end."""
        self._stop.set()

    async def run(self, on_ready: Any = lambda process: None) -> None:
        """Serve until the end. Raises `ConfigError` where it cannot listen."""
        private = PrivateServer(self._control_app(), self._paths.page_socket)
        if self._settings.port is not None:
            self._server = self._listening()
            await self._server.start()
        tasks = []
        requests = None
        try:
            await private.start()
            requests = await open_request_socket(self._paths.requests_socket, self.collector.ended)
            tasks = [asyncio.create_task(self.collector.run()), asyncio.create_task(self._follow_run(private))]
            stopping = asyncio.create_task(self._stop.wait())
            on_ready(self)
            done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            for task in done - {stopping}:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.sessions.clear()
            await self._whatifs.close()
            if requests is not None:
                requests.close()
                self._paths.requests_socket.unlink(missing_ok=True)
            await private.stop()
            await self.collector.close()
            if self._server is not None:
                await self._server.stop()

    def _listening(self) -> HttpServer:
        settings = self._settings
        assert settings.port is not None
        self._sock = bind_socket(settings.host, settings.port, option="Host.dashboard")
        hosts = {*settings.names, settings.host.lower()}
        if is_loopback(settings.host):
            hosts |= rules.LOOPBACK_NAMES
        page = Page(
            namespace=self._paths.namespace,
            collector=self.collector,
            sessions=self.sessions,
            acts=Acts(self.collector),
            whatifs=self._whatifs,
            base=settings.base,
            read_only=settings.read_only,
            secure=settings.cert is not None,
            hosts=frozenset(hosts),
            assets=load_assets(),
        )
        tls = Tls(settings.cert, settings.key) if settings.cert and settings.key else None
        return HttpServer(build_app(page), self._sock, idle=True, tls=tls)

    async def _follow_run(self, private: PrivateServer) -> None:
        """Make sockets anew that somebody has removed. With the run, end when its statefile is gone."""
        gone_s: float | None = None
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._paths.statefile.exists():
                gone_s = None
                if self._paths.runtime.is_dir():
                    with contextlib.suppress(DynamoError):
                        await private.renew_sockets()
                continue
            gone_s = time.monotonic() if gone_s is None else gone_s
            if self._settings.with_run and time.monotonic() - gone_s >= GONE_FOR_S:
                log.info("the run has ended")
                self.stop()

    def _control_app(self) -> Starlette:
        """On a unix socket of this user: new links."""

        async def link(_: Request) -> JSONResponse:
            url = self.link() if self._server is not None else None
            return JSONResponse({"url": url, "pid": os.getpid(), "read_only": self._settings.read_only})

        return Starlette(routes=[Route("/link", link)])


class Devices:
    """Looks at the GPUs' memory, use and strangers. Without a driver there is nothing to see. It blocks."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._tried = False

    def look(self) -> dict[str, Any]:
        """Memory, use and processes of each device, by UUID."""
        if not self._tried:
            self._tried = True
            with contextlib.suppress(Exception):
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
        if self._nvml is None:
            return {}
        from dynamo_local.system.gpus import open_inventory, optional

        try:
            devices = open_inventory(None, {}).sample()
        except DynamoError:
            return {}
        found = {}
        for device in devices:
            handle = optional(self._nvml, "nvmlDeviceGetHandleByUUID", device.uuid)
            rates = (
                handle if isinstance(handle, Missing) else optional(self._nvml, "nvmlDeviceGetUtilizationRates", handle)
            )
            found[device.uuid] = {
                "used": _known(device.memory_used_bytes),
                "total": _known(device.memory_total_bytes),
                "utilisation": None if isinstance(rates, Missing) else rates.gpu / 100,
                "processes": None if isinstance(device.processes, Missing) else list(map(_process, device.processes)),
            }
        return found


def _process(found: GpuProcess) -> dict[str, Any]:
    memory = _known(found.memory_bytes)
    return {"pid": found.pid, "session": _session(found.pid), "name": found.name, "bytes": memory}


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _known(value: Any) -> Any:
    return None if isinstance(value, Missing) else value


# --- asking a process that runs


def ask_running(paths: Paths) -> Mapping[str, Any] | None:
    """A new link of the page that runs; None where none does."""
    import httpx

    with httpx.Client(transport=httpx.HTTPTransport(uds=str(paths.page_socket)), timeout=ASK_S) as client:
        try:
            found = client.get("http://page/link").json()
        except (httpx.HTTPError, ValueError):
            return None
    return found if isinstance(found, dict) else None


def serve(settings: Settings, paths: Paths, on_ready: Any = lambda process: None) -> None:
    """Run the process until SIGTERM or Ctrl-C."""

    async def main() -> None:
        process = DashboardProcess(settings, paths)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.stop)
        await process.run(on_ready)

    asyncio.run(main())


def main(arguments: Sequence[str]) -> int:
    """The arbiter's side process: `python -m dynamo_local.dashboard --settings JSON`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True)
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = json.loads(parser.parse_args(arguments).settings)
    settings = Settings(**{**given, "names": tuple(given.get("names", ()))}).checked()
    paths = Paths.found(settings.namespace, os.environ)
    try:
        serve(settings, paths, lambda process: log.info("ready"))
    except NotRunning as error:
        log.error("%s", error)
        return error.exit_code
    return 0
