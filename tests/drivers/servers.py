"""Real etcd and NATS servers for tests, run from the same specs as `dynamo serve` runs them."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from dynamo_local.arbiter.servers import EtcdSpec, NatsSpec, find_server, prepare
from dynamo_local.state.store import load
from dynamo_local.system.host_leases import PortLease
from dynamo_local.system.paths import Paths
from dynamo_local.transport import certificates
from dynamo_local.transport.access import EtcdAccess, NatsAccess, run_environment
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.probes import probe_etcd, probe_nats

START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0
ETCDCTL_TIMEOUT_S = 30.0


class RealServer:
    """A server process that can be stopped, killed and started again on the same ports and data.

    `start`, `stop`, `kill` and `restart` are coroutines. Sync fixtures use `with`, or `start_now` and `stop_now`.
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
        assert self._process is None, "already started"
        self.spawn()
        await self.wait_ready()

    def spawn(self) -> None:
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
        await asyncio.to_thread(self._end, signal.SIGTERM)

    async def kill(self) -> None:
        await asyncio.to_thread(self._end, signal.SIGKILL)

    async def restart(self, *, lose_data: bool = False) -> None:
        """Kill it and start it again on the same ports, with or without what it had stored."""
        await self.kill()
        if lose_data:
            self.wipe()
        await self.start()

    def pause(self) -> None:
        """SIGSTOP, and wait until it stands still: connections stay open and nothing answers."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def wipe(self) -> None:
        for folder in self.spec.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start_now()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_now()

    def start_now(self) -> None:
        """`start` in a thread: a sync fixture may be asked for from inside a running event loop."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: asyncio.run(self.start())).result()

    def stop_now(self) -> None:
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
    """An etcd under `folder`, open to all, or with `tls` as `dynamo serve` starts one."""

    spec: EtcdSpec

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        ports = (PortLease(), PortLease())
        made = certificates.write(folder / "certificates") if tls else None
        spec = EtcdSpec(find_server("etcd"), folder / "data", ports[0].port, ports[1].port, made)
        super().__init__(spec, folder, ports)

    @property
    def endpoint(self) -> str:
        return self.spec.endpoint

    @property
    def env(self) -> dict[str, str]:
        return self.spec.client_env

    @property
    def access(self) -> EtcdAccess:
        return EtcdAccess.of(self.env)

    async def _probe(self) -> None:
        await probe_etcd(self.endpoint, START_DEADLINE_S, self.access)


class RealNats(RealServer):
    """A NATS server with JetStream under `folder`, without TLS, or with it as `dynamo serve` starts one."""

    spec: NatsSpec

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        ports, token = (PortLease(),), secrets.token_hex(24)
        made = certificates.write(folder / "certificates") if tls else None
        spec = NatsSpec(find_server("nats-server"), folder / "nats", ports[0].port, token, made)
        super().__init__(spec, folder, ports)

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def token(self) -> str:
        return self.spec.token

    @property
    def address(self) -> str:
        """`url` with the token in it, as a user may write it."""
        return self.url.replace("://", f"://{self.token}@")

    @property
    def token_file(self) -> Path:
        return self.spec.token_file

    @property
    def env(self) -> dict[str, str]:
        return self.spec.client_env

    @property
    def access(self) -> NatsAccess:
        return NatsAccess.of(self.env)

    async def _probe(self) -> None:
        await probe_nats(self.url, self.access, START_DEADLINE_S)


def etcdctl_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = {
        "ETCDCTL_ENDPOINTS": "ETCD_ENDPOINTS",
        "ETCDCTL_CACERT": "ETCD_AUTH_CA",
        "ETCDCTL_CERT": "ETCD_AUTH_CLIENT_CERT",
        "ETCDCTL_KEY": "ETCD_AUTH_CLIENT_KEY",
    }
    return {theirs: environment[ours] for theirs, ours in names.items() if ours in environment}


class Registry:
    """The etcd of a graph that runs, as its user reaches it: what `Served` knows of it."""

    paths: Paths
    namespace: str

    def environment(self) -> dict[str, str]:
        """The variables by which its etcd and NATS are reached."""
        return run_environment(load(self.paths.statefile))

    async def etcd(self) -> EtcdStore:
        env = self.environment()
        return await EtcdStore.connect(env["ETCD_ENDPOINTS"], access=EtcdAccess.of(env))

    def etcdctl(self, *words: str) -> str:
        """Run a stock etcdctl against the graph's etcd; its stdout."""
        etcdctl = shutil.which("etcdctl") or str(find_server("etcd").path.with_name("etcdctl"))
        done = subprocess.run(
            [etcdctl, *words],
            env={"PATH": os.environ["PATH"], **etcdctl_environment(self.environment())},
            capture_output=True,
            text=True,
            timeout=ETCDCTL_TIMEOUT_S,
            check=True,
        )
        return done.stdout

    def keys(self, prefix: str | None = None) -> list[str]:
        """Keys in the registry, by default all of the namespace's."""
        prefix = f"{self.namespace}/" if prefix is None else prefix
        return self.etcdctl("get", "--prefix", prefix, "--keys-only").split()
