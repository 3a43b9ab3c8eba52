"""The statefile's facts of a run as a whole: who its arbiter is, what it serves, on what."""

from __future__ import annotations

import os
from typing import Any, Literal

from dynamo_local.control.deployment import Deployment
from dynamo_local.state import Environment, State, SystemResources
from dynamo_local.system.processes import start_time_s


def arbiter_facts(deployment: Deployment) -> dict[str, Any]:
    """What the statefile's head says of this very arbiter: a successor's differ."""
    return {
        "circus_endpoint": deployment.paths.circus_endpoint,
        "arbiter_pid": os.getpid(),
        "arbiter_start_time": start_time_s(os.getpid()),
    }


def policy(deployment: Deployment) -> Literal["end", "keep"]:
    """What becomes of the workers when the arbiter is killed, as the statefile says it."""
    return "keep" if deployment.settings.keep_on_arbiter_death else "end"


def head_of(deployment: Deployment) -> State:
    """The statefile of a new run, before there is a worker in it."""
    return State(
        namespace=deployment.graph.namespace,
        run_id=deployment.run_id,
        **arbiter_facts(deployment),
        on_arbiter_death=policy(deployment),
        runtime_dir=str(deployment.paths.runtime),
        log_dir=str(deployment.paths.logs),
        target=deployment.graph.target,
        gpus=deployment.gpus_option,
        environment=Environment(
            DYNAMO_SERVICE_CONFIG=deployment.state_config_json,
            SYSTEM_RESOURCES=SystemResources(
                total_gpus=len(deployment.gpus), gpu_info=[str(device.index) for device in deployment.gpus]
            ),
        ),
    )


def without_credentials(url: str) -> str:
    """The URL without user and password: the statefile holds no secrets."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]
