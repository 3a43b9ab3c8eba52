"""gRPC over TLS, with the settings that etcd and NATS have (`transport.access.Tls`)."""

from __future__ import annotations

import grpc

from dynamo_local.errors import ConfigError
from dynamo_local.transport.access import PLUGIN_TLS, Tls


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """For a caller: trusts `tls.ca` (None: the system's authorities), and shows the certificate if there is one.

    Raises `ConfigError` for a certificate that is none, or a key of another one.
    """
    tls.context()  # gRPC says nothing of a file that it cannot use, until each call fails
    return grpc.ssl_channel_credentials(_bytes(tls.ca), _bytes(tls.key), _bytes(tls.certificate))


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """For a server: shows the certificate and, with `tls.ca`, demands one of that authority. Raises `ConfigError`."""
    certificate, key = _bytes(tls.certificate), _bytes(tls.key)
    if certificate is None or key is None:
        raise ConfigError(f"TLS on a port needs a certificate: set {PLUGIN_TLS[1]} and {PLUGIN_TLS[2]}")
    tls.context()
    return grpc.ssl_server_credentials([(key, certificate)], _bytes(tls.ca), require_client_auth=tls.ca is not None)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
