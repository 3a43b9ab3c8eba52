"""The certificates of one run: who holds the key in their folder may use the run's etcd and NATS, nobody else.

Made by a process of its own (`python -m dynamo_local.transport.certificates FOLDER`), because `cryptography` would cost
the arbiter 20 MB for as long as it lives. The authority's own key is never written anywhere: nothing can be signed
later.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_local.errors import InfraUnavailable

if TYPE_CHECKING:
    from cryptography.x509 import KeyUsage

MAKE_TIMEOUT_S = 30.0
VALID = (datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2099, 12, 31, tzinfo=datetime.UTC))
"""They live as long as the run: an end in time would only end runs on hosts whose clock is wrong."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files in `folder`: the authority, and one certificate with its key for the servers and all clients."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate of the authority that signed all others here: whom to trust."""
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The certificate of the servers, for 127.0.0.1, and of their clients."""
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        """The key of `certificate`: the run's secret."""
        return self.folder / "key.pem"

    @property
    def etcd_env(self) -> dict[str, str]:
        """As Dynamo names it for etcd's clients; the values are paths."""
        return {
            "ETCD_AUTH_CA": str(self.authority),
            "ETCD_AUTH_CLIENT_CERT": str(self.certificate),
            "ETCD_AUTH_CLIENT_KEY": str(self.key),
        }

    @property
    def nats_env(self) -> dict[str, str]:
        """Makes a client of NATS trust its server, and show its own certificate."""
        return {
            "NATS_TLS_CA_CERT_PATH": str(self.authority),
            "NATS_TLS_CLIENT_CERT_PATH": str(self.certificate),
            "NATS_TLS_CLIENT_KEY_PATH": str(self.key),
        }

    @property
    def etcd_shell_file(self) -> Path:
        """For a shell that wants to use `etcdctl`: sets its variables, and Dynamo's."""
        return self.folder / "etcd.env"

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """The files without which nobody can use the run's etcd and NATS."""
        return self.authority, self.certificate, self.key

    def texts(self) -> dict[Path, str]:
        """The content of the files, to write them again if somebody removes them. Raises `OSError`."""
        return {path: path.read_text() for path in self.paths}

    def missing(self) -> list[Path]:
        """Those of the files that are not there."""
        return [path for path in self.paths if not path.is_file()]


def make(folder: Path) -> Certificates:
    """Make the folder (0700) and new certificates (0600) in it. Blocks for a fifth of a second.

    Raises `InfraUnavailable` that says why it cannot be done.
    """
    made = Certificates(folder)
    command = (sys.executable, "-P", "-m", "dynamo_local.transport.certificates", str(folder))
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfraUnavailable(f"the certificates of the embedded etcd and NATS cannot be made: {error}") from error
    if made.missing():  # whoever reaps all children may have taken the exit code
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise InfraUnavailable(f"the certificates of the embedded etcd and NATS cannot be made: {lines[-1]}")
    return made


def write(folder: Path) -> Certificates:
    """The work of `make`, in this process."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        begins, ends = VALID
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(named("dynamo-local run"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
        )

    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = (
        builder(named("dynamo-local run"), root_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_only_signs(x509.KeyUsage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(root_key.public_key()), critical=False)
        .sign(root_key, hashes.SHA256())
    )
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    leaf = (
        builder(named("dynamo-local"), key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([Usage.SERVER_AUTH, Usage.CLIENT_AUTH]), critical=False)
        .sign(root_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    made = Certificates(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    _write_private(made.authority, root.public_bytes(pem))
    _write_private(made.certificate, leaf.public_bytes(pem))
    _write_private(made.key, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return made


def _only_signs(usage: Callable[..., KeyUsage]) -> KeyUsage:
    """The uses of the authority's key."""
    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    more = ("crl_sign", "encipher_only", "decipher_only")
    return usage(key_cert_sign=True, **dict.fromkeys((*others, *more), False))


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
