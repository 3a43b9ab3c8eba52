"""etcd and NATS that demand something of their clients: certificates, passwords, tokens."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.errors import Error as NatsError

from dynamo_local.arbiter.leftovers import revoke
from dynamo_local.errors import ConfigError, EtcdUnavailable, NatsUnavailable
from dynamo_local.ports import DeleteEvent, PutEvent, SnapshotEvent
from dynamo_local.transport.access import EtcdAccess, NatsAccess
from dynamo_local.transport.certificates import Certificates, write
from dynamo_local.transport.etcd import EtcdRefused, EtcdStore
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.probes import probe_etcd, probe_nats
from tests.drivers.eventually import eventually
from tests.drivers.servers import RealEtcd, RealNats

pytestmark = pytest.mark.infra
PASSWORD = "hush-hush-4711"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    """As `dynamo serve` starts one."""
    with RealEtcd(tmp_path_factory.mktemp("etcd"), tls=True) as server:
        yield server


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNats]:
    """As `dynamo serve` starts one."""
    with RealNats(tmp_path_factory.mktemp("nats"), tls=True) as server:
        yield server


@pytest.fixture
def strangers(tmp_path: Path) -> Certificates:
    return write(tmp_path / "stranger")


@pytest.fixture
def with_password(own_etcd: RealEtcd) -> RealEtcd:
    """A user's etcd with authentication on, and the user `root`."""
    ctl = own_etcd.spec.binary.path.with_name("etcdctl")
    for words in (("user", "add", f"root:{PASSWORD}"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
        subprocess.run([ctl, "--endpoints", own_etcd.endpoint, *words], check=True, capture_output=True)
    return own_etcd


def allowed(password: str = PASSWORD) -> EtcdAccess:
    return EtcdAccess.of({"ETCD_AUTH_USERNAME": "root", "ETCD_AUTH_PASSWORD": password})


async def test_the_runs_certificate_opens_etcd(etcd: RealEtcd) -> None:
    store = await EtcdStore.connect(etcd.endpoint, access=etcd.access)
    try:
        lease = await store.grant(30)
        events = store.watch_prefix("a/")
        assert isinstance(await anext(events), SnapshotEvent)
        await store.put("a/key", b"1", lease)
        assert isinstance(await anext(events), PutEvent)
        assert await store.keepalive(lease) > 0
        revoke(etcd.endpoint, str(_made(etcd).folder), [f"{lease:x}"])
        assert isinstance(await anext(events), DeleteEvent)
        await events.aclose()
    finally:
        await store.close()


def _made(server: RealEtcd | RealNats) -> Certificates:
    made = server.spec.certificates
    assert made is not None
    return made


@pytest.mark.parametrize("port", ["client", "peer"])
async def test_etcd_tells_a_stranger_nothing(etcd: RealEtcd, strangers: Certificates, port: str) -> None:
    number = etcd.spec.client_port if port == "client" else etcd.spec.peer_port
    endpoint = f"https://127.0.0.1:{number}"
    authority = {"ETCD_AUTH_CA": str(_made(etcd).authority)}
    own = {**strangers.etcd_env, **authority}
    for env in (authority, own):
        with pytest.raises(EtcdUnavailable, match="refused our certificate"):
            await asyncio.wait_for(probe_etcd(endpoint, 60.0, EtcdAccess.of(env)), 10.0)
    with pytest.raises(EtcdUnavailable):
        await EtcdStore.connect(endpoint, timeout_s=0.5, access=EtcdAccess.of(own))


async def test_an_impostor_is_told_nothing(etcd: RealEtcd, strangers: Certificates) -> None:
    with pytest.raises(EtcdUnavailable, match=r"not trusted.*check ETCD_AUTH_CA"):
        await asyncio.wait_for(probe_etcd(etcd.endpoint, 60.0, EtcdAccess.of(strangers.etcd_env)), 10.0)
    with pytest.raises(EtcdUnavailable):
        await EtcdStore.connect(etcd.endpoint, timeout_s=0.5, access=EtcdAccess.of(strangers.etcd_env))


async def test_an_address_without_https_says_what_to_write(etcd: RealEtcd) -> None:
    with pytest.raises(EtcdUnavailable, match=r"speaks TLS, write its address as https://127\.0\.0\.1"):
        await probe_etcd(etcd.endpoint.replace("https", "http"), 5.0)


async def test_a_password_opens_etcd_again_after_it_was_restarted(with_password: RealEtcd) -> None:
    store = await EtcdStore.connect(with_password.endpoint, access=allowed())
    try:
        events = store.watch_prefix("a/")
        assert isinstance(await anext(events), SnapshotEvent)
        lease = await store.grant(60)
        await with_password.restart()
        await _until_written(store, lease)
        seen = await asyncio.wait_for(anext(events), 10.0)
        while not (isinstance(seen, PutEvent) or (isinstance(seen, SnapshotEvent) and seen.kvs)):
            seen = await asyncio.wait_for(anext(events), 10.0)
        await events.aclose()
    finally:
        await store.close()


async def _until_written(store: EtcdStore, lease: int) -> None:
    async with asyncio.timeout(20.0):
        while True:
            try:
                await store.put("a/key", b"1", lease)
            except EtcdRefused:
                raise
            except EtcdUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_wrong_password_is_refused_at_once(with_password: RealEtcd) -> None:
    with pytest.raises(EtcdRefused, match="ETCD_AUTH_PASSWORD") as caught:
        await asyncio.wait_for(
            EtcdStore.connect_when_up(with_password.endpoint, 60.0, access=allowed("wrong-one")), 10.0
        )
    assert "wrong-one" not in str(caught.value)
    with pytest.raises(EtcdRefused):
        await asyncio.wait_for(EtcdStore.connect_when_up(with_password.endpoint, 60.0), 10.0)


async def test_the_runs_certificate_and_token_open_nats(nats: RealNats) -> None:
    await probe_nats(nats.url, nats.access, 5.0)
    client = await connect_nats(nats.url, nats.access)
    inbox = await client.subscribe("a")
    await client.publish("a", b"1")
    assert (await inbox.next_msg(5.0)).data == b"1"
    await close_quietly(client)


async def test_nats_is_found_again_after_it_was_killed(nats: RealNats) -> None:
    client = await connect_nats(nats.url, nats.access)
    inbox = await client.subscribe("a")
    await nats.kill()
    nats.spawn()
    async with asyncio.timeout(20.0):
        while True:
            with contextlib.suppress(NatsError):
                await client.publish("a", b"1")
                await inbox.next_msg(0.2)
                break
    await close_quietly(client)


async def test_nats_takes_neither_half_alone(nats: RealNats, strangers: Certificates) -> None:
    made, token = _made(nats), {"DYN_NATS_TOKEN_FILE": str(nats.token_file)}
    authority = {"NATS_TLS_CA_CERT_PATH": str(made.authority)}
    for env in ({**token, **authority}, {**token, **strangers.nats_env, **authority}, made.nats_env):
        with pytest.raises(NatsUnavailable, match="refused our"):
            await asyncio.wait_for(probe_nats(nats.url, NatsAccess.of(env), 60.0), 10.0)
        with pytest.raises(NatsUnavailable):
            await connect_nats(nats.url, NatsAccess.of(env), timeout_s=1.0)


async def test_the_token_is_not_told_to_an_impostor(nats: RealNats) -> None:
    heard: list[bytes] = []
    connected: list[int] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(1)
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"jetstream":true}\r\n')
        with contextlib.suppress(ConnectionError):
            heard.append(await reader.read(4096))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        connected.pop()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    url = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(NatsUnavailable):
        await connect_nats(url, nats.access, timeout_s=0.5)
    with pytest.raises(NatsUnavailable):
        await probe_nats(url, nats.access, 0.5)
    server.close()
    await eventually(lambda: not connected)
    assert heard
    assert not any(nats.token.encode() in said for said in heard)


async def test_nats_that_demands_tls_says_what_to_write(nats: RealNats) -> None:
    with pytest.raises(NatsUnavailable, match=r"tls://127\.0\.0\.1.*NATS_TLS_CA_CERT_PATH"):
        await asyncio.wait_for(probe_nats(nats.url.replace("tls", "nats"), NatsAccess(nats.token), 60.0), 10.0)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"ETCD_AUTH_CA": "/no/such/file"}, "ETCD_AUTH_CA"),
        ({"ETCD_AUTH_CA": "/proc/self/cmdline"}, "holds no PEM"),
        ({"ETCD_AUTH_CLIENT_CERT": "-----BEGIN CERTIFICATE-----"}, "ETCD_AUTH_CLIENT_KEY"),
        ({"ETCD_AUTH_USERNAME": "root"}, "ETCD_AUTH_PASSWORD"),
    ],
)
def test_what_cannot_be_used_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EtcdAccess.of(env)


def test_what_is_secret_is_not_shown(etcd: RealEtcd, nats: RealNats) -> None:
    key = _made(etcd).key.read_text().splitlines()[1]
    assert key in str(etcd.access.tls.key)
    assert key not in repr(etcd.access)
    assert nats.token not in repr(nats.access)
    assert PASSWORD not in repr(allowed())


def test_pem_itself_will_do_as_for_dynamo(etcd: RealEtcd) -> None:
    texts = {name: Path(path).read_text() for name, path in _made(etcd).etcd_env.items()}
    assert EtcdAccess.of(texts) == etcd.access
