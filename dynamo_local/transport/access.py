"""With what etcd and NATS are reached: certificates, passwords and tokens, from the variables that Dynamo 1.x reads.

A certificate or key in a variable is the path of a PEM file, or PEM itself, as Dynamo 1.x wants it. Secrets are
never shown: not by `repr`, not in an error.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_local.errors import ConfigError
from dynamo_local.transport.certificates import Certificates

if TYPE_CHECKING:
    import grpc

    from dynamo_local.state.schema import State

PEM = "-----BEGIN "
ETCD_TLS = ("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
NATS_TLS = ("NATS_TLS_CA_CERT_PATH", "NATS_TLS_CLIENT_CERT_PATH", "NATS_TLS_CLIENT_KEY_PATH")
ETCD_ACCESS = (*ETCD_TLS, "ETCD_AUTH_USERNAME", "ETCD_AUTH_PASSWORD")
NATS_ACCESS = (*NATS_TLS, "NATS_AUTH_USERNAME", "NATS_AUTH_PASSWORD", "NATS_AUTH_TOKEN", "DYN_NATS_TOKEN_FILE")
PLUGIN_TLS = ("DYN_PLUGIN_TLS_CA_CERT_PATH", "DYN_PLUGIN_TLS_CERT_PATH", "DYN_PLUGIN_TLS_KEY_PATH")
"""The same three of the planner's plugins: of their gateway, which shows the certificate, and of calls to them."""
NOT_SPOKEN = ("NATS_AUTH_NKEY", "NATS_AUTH_CREDENTIALS_FILE", "NATS_TLS_INSECURE")


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificate for, and the demands on, a server that speaks TLS, each in PEM.

    Without `ca` the authorities of the system are trusted; without `certificate` none is shown.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environ: Mapping[str, str], names: tuple[str, str, str]) -> Tls:
        """From the variables called `names`. Raises `ConfigError` naming the variable that cannot be used."""
        ca, certificate, key = (_pem(environ, name) for name in names)
        if (certificate is None) != (key is None):
            raise ConfigError(f"{names[1]} and {names[2]} belong together: set both, or neither")
        return cls(ca, certificate, key)

    def context(self) -> ssl.SSLContext:
        """For a client of Python's. Raises `ConfigError` for what is no certificate, or a key of another one."""
        try:
            context = ssl.create_default_context(cadata=self.ca)
            # Set by default from Python 3.13 on, it refuses what `openssl req -x509` makes.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if self.certificate is not None and self.key is not None:
                # `ssl` reads files only: one in memory, gone with its descriptor.
                descriptor = os.memfd_create("client-certificate")
                try:
                    os.write(descriptor, f"{self.certificate}\n{self.key}".encode())
                    context.load_cert_chain(f"/proc/self/fd/{descriptor}")
                finally:
                    os.close(descriptor)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigError(f"the certificates for etcd or NATS cannot be used: {reason}") from None
        return context


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How etcd knows us. TLS is spoken to endpoints that begin with `https://`."""

    tls: Tls = Tls()
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> EtcdAccess:
        """Raises `ConfigError` naming the variable that cannot be used."""
        user, password = _both(environ, "ETCD_AUTH_USERNAME", "ETCD_AUTH_PASSWORD")
        return cls(Tls.of(environ, ETCD_TLS), user, password)


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """How NATS knows us; what the URL itself says of user or token counts where nothing is said here."""

    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    """None: TLS is spoken only where the URL begins with `tls://`."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> NatsAccess:
        """Raises `ConfigError` naming the variable that cannot be used."""
        for name in NOT_SPOKEN:
            if environ.get(name):
                raise ConfigError(f"{name} is not supported: use a token, a user with a password, or certificates")
        user, password = _both(environ, "NATS_AUTH_USERNAME", "NATS_AUTH_PASSWORD")
        file = environ.get("DYN_NATS_TOKEN_FILE")
        token = read_token(Path(file)) if file else environ.get("NATS_AUTH_TOKEN") or None
        tls = Tls.of(environ, NATS_TLS) if any(environ.get(name) for name in NATS_TLS) else None
        return cls(token, user, password, tls)

    def context(self, scheme: str) -> ssl.SSLContext | None:
        """For a server whose URL has that scheme; None where TLS is not spoken."""
        if self.tls is None and scheme != "tls":
            return None
        return (self.tls or Tls()).context()


def run_environment(state: State) -> dict[str, str]:
    """The way to a run's etcd and NATS, from its statefile: the same that its workers were given.

    If the servers are the user's, only their addresses: a statefile holds no secrets.
    """
    env = {"ETCD_ENDPOINTS": state.etcd_endpoints or "", "NATS_SERVER": state.nats_server or ""}
    if state.nats_token_file:
        env["DYN_NATS_TOKEN_FILE"] = state.nats_token_file
    if state.certificates:
        made = Certificates(Path(state.certificates))
        kinds = {server.kind for server in (state.servers or {}).values()}
        env |= made.etcd_env if "etcd" in kinds else {}
        env |= made.nats_env if "nats" in kinds else {}
    return env


def without_access(environ: Mapping[str, str], *, etcd: bool, nats: bool) -> dict[str, str]:
    """`environ` without what belongs to another etcd, or NATS, than the embedded one: it would be refused there."""
    foreign = {*(ETCD_ACCESS if etcd else ()), *((*NATS_ACCESS, *NOT_SPOKEN) if nats else ())}
    return {name: value for name, value in environ.items() if name not in foreign}


def read_token(token_file: Path | None) -> str | None:
    """The token in that file, None for no file. Raises `ConfigError` that names the file."""
    if token_file is None:
        return None
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the NATS token file {token_file} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"the NATS token file {token_file} is empty")
    return token


def _pem(environ: Mapping[str, str], name: str) -> str | None:
    text = environ.get(name)
    if not text or PEM in text:
        return text or None
    try:
        found = Path(text).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the file that {name} names cannot be read: {why}") from None  # it may be a key after all
    if PEM not in found:
        raise ConfigError(f"the file that {name} names holds no PEM: {text}")
    return found


def _both(environ: Mapping[str, str], user: str, password: str) -> tuple[str | None, str | None]:
    found = environ.get(user) or None, environ.get(password) or None
    if (found[0] is None) != (found[1] is None):
        raise ConfigError(f"{user} and {password} belong together: set both, or neither")
    return found


# gRPC over TLS, with the settings that etcd and NATS have. gRPC is imported only where it is used.


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """For a caller: trusts `tls.ca` (None: the system's authorities), and shows the certificate if there is one.

    Raises `ConfigError` for a certificate that is none, or a key of another one.
    """
    import grpc

    tls.context()  # gRPC says nothing of a file that it cannot use, until each call fails
    return grpc.ssl_channel_credentials(_bytes(tls.ca), _bytes(tls.key), _bytes(tls.certificate))


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """For a server: shows the certificate and, with `tls.ca`, demands one of that authority. Raises `ConfigError`."""
    import grpc

    certificate, key = _bytes(tls.certificate), _bytes(tls.key)
    if certificate is None or key is None:
        raise ConfigError(f"TLS on a port needs a certificate: set {PLUGIN_TLS[1]} and {PLUGIN_TLS[2]}")
    tls.context()
    return grpc.ssl_server_credentials([(key, certificate)], _bytes(tls.ca), require_client_auth=tls.ca is not None)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
