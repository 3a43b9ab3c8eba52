"""A graph on a real API server, with planners that may do what the manifest's Role lets them, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.contract.kubernetes.kube_worlds import planner_rules
from tests.drivers.kube_server import RealKube
from tests.drivers.pod_planner import Cluster, cluster


@asynccontextmanager
async def real_cluster(
    server: RealKube, folder: Path, graph: dict[str, Any] | None = None, **operator: Any
) -> AsyncIterator[Cluster]:
    """Many requests from the first moment on. `operator`: of its stand-in."""
    async with server.lent():
        config = server.kubeconfig(await server.token(planner_rules()))
        async with cluster(server.client(), config, folder, graph, **operator) as here:
            yield here
