"""`python -m dynamo_local.planner --environment kubernetes --config …`: runs a planner by itself, in a pod."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.planner import EITHER_SPELLING, given_options, planner_options

if TYPE_CHECKING:
    from dynamo_local.kubernetes.planner import PodOptions

log = logging.getLogger(__name__)

OWN_WORDS = ("--config", "--environment=kubernetes", "--graph", "--kubeconfig")


def is_meant(words: Sequence[str]) -> bool:
    """Whether these words of `python -m dynamo_local.planner` mean a planner in a pod.

    Dynamo's planner starts there with `--config` alone.
    """
    pairs = itertools.pairwise(words)
    return any(word.partition("=")[0] in OWN_WORDS or word in OWN_WORDS for word in words) or (
        ("--environment", "kubernetes") in pairs
    )


@click.command("dynamo_local.planner", context_settings=EITHER_SPELLING)
@click.option("--config", "config", help="The options: a file (YAML, JSON), or JSON itself. Others here go over them.")
@click.option("--graph", help="Name of the DynamoGraphDeployment.  [default: $DYN_PARENT_DGD_K8S_NAME]")
@click.option("--kubernetes-namespace", help="Where it is.  [default: the pod's, or that of the kubeconfig's context]")
@click.option("--kubeconfig", type=click.Path(path_type=Path, dir_okay=False), help="Outside of a cluster: this file.")
@click.option("--frontend", help="URL of the frontends' /metrics.  [default: http://GRAPH-frontend:8000/metrics]")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Port of /metrics; 0: none.  [default: 9085]")
@click.option(
    "--system-port",
    type=click.IntRange(0, 65535),
    help="Port of /live and /health; 0: none.  [default: $DYN_SYSTEM_PORT, else 9090 in a pod]",
)
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), default=Path("planner_logs"))
@planner_options
def in_cluster(
    config: str | None,
    graph: str | None,
    kubernetes_namespace: str | None,
    kubeconfig: Path | None,
    frontend: str | None,
    metrics_port: int | None,
    system_port: int | None,
    logs: Path,
    **options: Any,
) -> None:
    """Plan a DynamoGraphDeployment by Dynamo's operator.

    In a pod of its cluster, or anywhere with a kubeconfig.
    """
    from dynamo_local.kubernetes.planner import PodOptions, read_config

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    planner, port = read_config(config, given_options(options))
    port = port if metrics_port is None else metrics_port
    asyncio.run(_run(PodOptions(planner, port, system_port, graph, kubernetes_namespace, kubeconfig, frontend, logs)))


async def _run(options: PodOptions) -> None:
    from dynamo_local.kubernetes.planner import started

    ending = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, ending.set)
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.getpid()}"
    stop = await started(options, identity)
    try:
        await ending.wait()
        log.info("the planner ends")
    finally:
        await stop()
