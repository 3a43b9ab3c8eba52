"""The certificates of a run, and by which variables its servers are reached."""

from __future__ import annotations

import contextlib
import ssl
import stat
from pathlib import Path

import pytest

from dynamo_local.arbiter.servers import EtcdSpec, NatsSpec, ServerBinary, prepare
from dynamo_local.errors import InfraUnavailable
from dynamo_local.state.schema import ServerEntry, State
from dynamo_local.transport.access import ETCD_ACCESS, NATS_ACCESS, EtcdAccess, run_environment, without_access
from dynamo_local.transport.certificates import Certificates, make, write

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """As `dynamo serve` makes them: by another process."""
    return make(tmp_path_factory.mktemp("run") / "certificates")


def etcd_spec(folder: Path, made: Certificates | None) -> EtcdSpec:
    return EtcdSpec(ServerBinary("etcd", Path("/opt/etcd"), "PATH", None), folder / "etcd", 1, 2, made)


def nats_spec(folder: Path, made: Certificates | None) -> NatsSpec:
    return NatsSpec(ServerBinary("nats-server", Path("/opt/nats"), "PATH", None), folder / "nats", 3, TOKEN, made)


def test_they_are_their_owners_alone(made: Certificates) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.folder.iterdir()}
    assert modes == {"ca.pem": 0o600, "cert.pem": 0o600, "key.pem": 0o600}
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700


def test_they_pass_the_strictest_check_there_is(made: Certificates) -> None:
    context = ssl.create_default_context(cafile=str(made.authority))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(made.certificate, made.key)
    left, right = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(left, right, server_hostname="127.0.0.1")
    server = serving.wrap_bio(right, left, server_side=True)
    waiting = [client, server] * 3
    while waiting:
        with contextlib.suppress(ssl.SSLWantReadError):
            waiting.pop(0).do_handshake()
    assert client.version() == "TLSv1.3"


def test_no_two_runs_have_the_same(made: Certificates, tmp_path: Path) -> None:
    other = write(tmp_path)
    assert other.key.read_text() != made.key.read_text()
    assert other.authority.read_text() != made.authority.read_text()
    context = ssl.create_default_context(cafile=str(made.authority))
    with pytest.raises(ssl.SSLError):
        context.load_cert_chain(other.certificate, made.key)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfraUnavailable, match=r"certificates .* cannot be made: .*Not a directory"):
        make(tmp_path / "file" / "certificates")


def test_servers_with_certificates_ask_everybody_for_one(made: Certificates, tmp_path: Path) -> None:
    etcd, nats = etcd_spec(tmp_path, made), nats_spec(tmp_path, made)
    assert {"--client-cert-auth", "--peer-client-cert-auth"} <= set(etcd.argv)
    assert not any(word.startswith("--") and "=http:" in word for word in etcd.argv)
    assert "verify: true" in nats.files[nats.config_file]
    assert (etcd.endpoint, nats.url) == ("https://127.0.0.1:1", "tls://127.0.0.1:3")
    words = " ".join((*etcd.argv, *nats.argv))
    assert made.key.read_text().splitlines()[1] not in words
    assert TOKEN not in words


def test_the_file_for_a_shell_sets_what_etcdctl_and_dynamo_read(made: Certificates, tmp_path: Path) -> None:
    spec = etcd_spec(tmp_path, made)
    prepare(spec)
    text = made.etcd_shell_file.read_text()
    assert f"ETCDCTL_KEY={made.key}" in text
    assert f'ETCD_AUTH_CLIENT_KEY="$(cat {made.key})"' in text
    assert stat.S_IMODE(made.etcd_shell_file.stat().st_mode) == 0o600
    made.etcd_shell_file.unlink()


@pytest.mark.parametrize("embedded", ["etcd", "nats"])
def test_a_runs_variables_are_those_of_its_embedded_servers(made: Certificates, embedded: str) -> None:
    server = ServerEntry(kind=embedded, binary="/opt/x", ports=[1])  # type: ignore[arg-type]
    state = State(
        namespace="dynamo",
        run_id="r",
        etcd_endpoints="https://127.0.0.1:1",
        nats_server="tls://127.0.0.1:2",
        certificates=str(made.folder),
        servers={f"dynamo_{embedded}": server},
    )
    env = run_environment(state)
    assert (EtcdAccess.of(env).tls.key is not None) is (embedded == "etcd")
    assert ("NATS_TLS_CLIENT_KEY_PATH" in env) is (embedded == "nats")


def test_embedded_servers_are_not_shown_what_belongs_to_others() -> None:
    """A password in the shell would make Dynamo's processes forget their certificates."""
    environ = {name: "x" for name in (*ETCD_ACCESS, *NATS_ACCESS, "PATH")}
    assert without_access(environ, etcd=True, nats=True) == {"PATH": "x"}
    assert without_access(environ, etcd=False, nats=False) == environ
    assert set(without_access(environ, etcd=True, nats=False)) == {*NATS_ACCESS, "PATH"}
