"""`dynamo serve` on an etcd and a NATS of the user's that demand certificates or passwords."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.transport.certificates import write
from tests.drivers.served import AGG, Served, asking, auntil, expected, until
from tests.drivers.servers import RealEtcd, RealNats

pytestmark = pytest.mark.infra
PASSWORD = "hush-hush-4711"


@pytest.fixture
def with_certificates(tmp_path: Path) -> Iterator[tuple[RealEtcd, RealNats]]:
    with RealEtcd(tmp_path / "etcd", tls=True) as etcd, RealNats(tmp_path / "nats", tls=True) as nats:
        yield etcd, nats


@pytest.mark.full
async def test_a_graph_lives_on_servers_that_demand_certificates(with_certificates: tuple[RealEtcd, RealNats]) -> None:
    etcd, nats = with_certificates
    with Served(target=AGG, env={**etcd.env, **nats.env}).started() as served:
        async with served.client() as client:
            answer = await client.chat.completions.create(**asking("Are you there?", 8))
        assert served.cli("scale", "VllmWorker", "+1", "--wait").returncode == 0
        statefile = served.paths.statefile.read_text()
        embedded = served.status()["servers"]
        served.down()
        keys = _etcdctl(etcd, "get", "--prefix", "dynamo/", "--keys-only")
    assert answer.choices[0].message.content == expected("Are you there?", 8)[0]
    assert (embedded, keys.strip()) == ([], "")
    assert nats.token not in statefile


def _etcdctl(etcd: RealEtcd, *words: str) -> str:
    made = etcd.spec.certificates
    tls = () if made is None else ("--cacert", made.authority, "--cert", made.certificate, "--key", made.key)
    ctl = etcd.spec.binary.path.with_name("etcdctl")
    done = subprocess.run([ctl, "--endpoints", etcd.endpoint, *tls, *words], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.timing
@pytest.mark.full
async def test_a_killed_arbiters_leases_are_revoked_where_a_password_is_demanded(
    own_etcd: RealEtcd, nats_server: RealNats
) -> None:
    """The guardian knows the password too."""
    for words in (("user", "add", f"root:{PASSWORD}"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
        _etcdctl(own_etcd, *words)
    env = {
        **own_etcd.env,
        **nats_server.env,
        "ETCD_AUTH_USERNAME": "root",
        "ETCD_AUTH_PASSWORD": PASSWORD,
        "DYN_LEASE_TTL_S": "60",
    }
    with Served(target=AGG, env=env).started() as served:
        assert _keys(own_etcd) != ""
        statefile = served.paths.statefile.read_text()
        shown = " ".join(line for _, line in served.processes())
        served.kill_arbiter()
        await auntil(lambda: _keys(own_etcd) == "", 40.0)
        await auntil(lambda: not served.processes(), 20.0)
    assert PASSWORD not in statefile + shown


def _keys(etcd: RealEtcd) -> str:
    return _etcdctl(etcd, "--user", f"root:{PASSWORD}", "get", "--prefix", "dynamo/", "--keys-only").strip()


def test_certificates_of_somebody_else_end_the_start_at_once(
    with_certificates: tuple[RealEtcd, RealNats], tmp_path: Path
) -> None:
    etcd, nats = with_certificates
    env = {**etcd.env, **nats.env, **write(tmp_path / "other").etcd_env}
    with Served(target=AGG, env=env) as served:
        refused = served.cli(*served.serve_words())
        until(lambda: not served.processes())
    assert refused.returncode == 1
    assert "not trusted" in refused.stderr
    assert "ETCD_AUTH_CA" in refused.stderr
