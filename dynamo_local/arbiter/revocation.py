"""Leases of what is dead, revoked over etcd's JSON gateway: gRPC would double the size of the guardian."""

from __future__ import annotations

import http.client
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo_local.errors import ConfigError
from dynamo_local.transport.access import EtcdAccess
from dynamo_local.transport.certificates import Certificates

log = logging.getLogger(__name__)

REVOKE_TIMEOUT_S = 2.0
"""For each call to etcd: one that does not answer lets the leases expire by themselves."""


def revoke(endpoints: str | None, certificates: str | None, leases: Iterable[str]) -> None:
    """Revoke leases (hex) while etcd still answers; a failure is logged, they expire by themselves.

    `certificates` is the folder of those of the embedded etcd; an etcd of the user's (None) is reached with what our
    environment says (`transport.access`).
    """
    leases = list(leases)
    if not endpoints or not leases:
        return
    first = endpoints.split(",")[0].strip()
    try:
        _revoke_at(first, certificates, leases)
    except (OSError, ValueError, http.client.HTTPException, ConfigError) as error:
        log.warning("etcd at %s does not answer us, the leases expire by themselves: %s", first, error)


def _revoke_at(endpoint: str, certificates: str | None, leases: list[str]) -> None:
    env = Certificates(Path(certificates)).etcd_env if certificates else os.environ
    access = EtcdAccess.of(env)
    target = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    host, port = target.hostname or "", target.port or 2379
    connection = (
        http.client.HTTPSConnection(host, port, timeout=REVOKE_TIMEOUT_S, context=access.tls.context())
        if target.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=REVOKE_TIMEOUT_S)
    )

    def ask(path: str, body: dict[str, Any], headers: Mapping[str, str]) -> tuple[int, str]:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")

    try:
        headers = {}
        if access.user is not None:
            status, text = ask("/v3/auth/authenticate", {"name": access.user, "password": access.password}, {})
            if status == http.client.OK:
                headers["Authorization"] = json.loads(text)["token"]
        for lease in leases:
            status, text = ask("/v3/lease/revoke", {"ID": str(int(lease, 16))}, headers)
            if status != http.client.OK and "lease not found" not in text:
                log.warning("lease %s was not revoked (it expires by itself): %s", lease, text.strip())
    finally:
        connection.close()
