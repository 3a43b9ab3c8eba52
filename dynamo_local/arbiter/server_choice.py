"""Which etcd and NATS a run uses: the user's, or embedded ones, and with what its processes reach them."""

from __future__ import annotations

from dynamo_local.arbiter.deployment import Deployment
from dynamo_local.arbiter.servers import EmbeddedServers
from dynamo_local.arbiter.statefile import without_credentials
from dynamo_local.state.schema import State


async def choose_servers(
    deployment: Deployment, servers: EmbeddedServers, head: State
) -> tuple[list[str], dict[str, str]]:
    """Prepare etcd and NATS where the user has none; returns who is to be started, and the workers' variables.

    Addresses and secrets are there before the servers run, so nobody waits for them. What is no secret is noted in
    `head`, for a successor and for who clears up after us.
    """
    names: list[str] = []
    env: dict[str, str] = {}
    etcd, nats = deployment.etcd_endpoints, deployment.nats_server
    if etcd is None:
        name, etcd_spec = await servers.start_etcd()
        names.append(name)
        env |= etcd_spec.client_env
    else:
        env["ETCD_ENDPOINTS"] = etcd
    if nats is None:
        name, nats_spec = await servers.start_nats()
        names.append(name)
        env |= nats_spec.client_env
    else:
        env["NATS_SERVER"] = nats
        if token_file := deployment.factory.base_env.get("DYN_NATS_TOKEN_FILE"):
            env["DYN_NATS_TOKEN_FILE"] = token_file
    head.etcd_endpoints, head.nats_server = env["ETCD_ENDPOINTS"], without_credentials(env["NATS_SERVER"])
    head.nats_token_file = env.get("DYN_NATS_TOKEN_FILE")
    head.certificates = None if servers.certificates is None else str(servers.certificates.folder)
    return names, env
