"""Real etcd and NATS servers for tests, run from the same specs as `dynamo serve` runs them."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dynamo_local.serve.infra import EtcdSpec, NatsSpec, PortLease, find_server, prepare, probe_etcd, probe_nats

START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0


class RealServer:
    """A server process that can be stopped, killed and started again on the same ports and data.

    `start`, `stop`, `kill` and `restart` are coroutines; `start_now` and `stop_now` are for sync fixtures.
    """

    def __init__(self, spec: EtcdSpec | NatsSpec, folder: Path, ports: tuple[PortLease, ...]) -> None:
        self.spec = spec
        self.folder = folder
        self._ports = ports
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def log_file(self) -> Path:
        return self.folder / "server.log"

    async def start(self) -> None:
        """Start it and wait until it answers."""
        assert self._process is None, "already started"
        self.spawn()
        await self.wait_ready()

    def spawn(self) -> None:
        """Start it without waiting."""
        prepare(self.spec)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.spec.argv, env=self.spec.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    async def wait_ready(self) -> None:
        """Return when it answers; its log's tail is in the error otherwise."""
        try:
            await self._probe()
        except BaseException as error:
            error.add_note(self.log_file.read_text(errors="replace")[-2000:])
            self._end(signal.SIGKILL)
            raise

    async def _probe(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        await asyncio.to_thread(self._end, signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        await asyncio.to_thread(self._end, signal.SIGKILL)

    async def restart(self, *, lose_data: bool = False) -> None:
        """Kill it and start it again on the same ports, with or without what it had stored."""
        await self.kill()
        if lose_data:
            self.wipe()
        await self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Remove its data while it is down."""
        for folder in self.spec.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def start_now(self) -> None:
        """`start` in a thread: a sync fixture may be asked for from inside a running event loop."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: asyncio.run(self.start())).result()

    def stop_now(self) -> None:
        """End it and give its ports back."""
        self._end(signal.SIGTERM)
        for port in self._ports:
            port.close()

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


class RealEtcd(RealServer):
    """An etcd under `folder`."""

    spec: EtcdSpec

    def __init__(self, folder: Path) -> None:
        ports = (PortLease(), PortLease())
        spec = EtcdSpec(find_server("etcd"), folder / "data", ports[0].port, ports[1].port)
        super().__init__(spec, folder, ports)

    @property
    def endpoint(self) -> str:
        """`http://127.0.0.1:<port>`."""
        return self.spec.endpoint

    async def _probe(self) -> None:
        await probe_etcd(self.endpoint, START_DEADLINE_S)


class RealNats(RealServer):
    """A NATS server with JetStream under `folder`."""

    spec: NatsSpec

    def __init__(self, folder: Path, token: str | None = None) -> None:
        ports = (PortLease(),)
        spec = NatsSpec(find_server("nats-server"), folder / "nats", ports[0].port, token or secrets.token_hex(24))
        super().__init__(spec, folder, ports)

    @property
    def url(self) -> str:
        """`nats://127.0.0.1:<port>`, without the token."""
        return self.spec.url

    @property
    def token(self) -> str:
        return self.spec.token

    @property
    def token_file(self) -> Path:
        return self.spec.token_file

    async def _probe(self) -> None:
        await probe_nats(self.url, self.token, START_DEADLINE_S)
