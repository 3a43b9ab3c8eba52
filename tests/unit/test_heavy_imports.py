"""Which libraries a kind of process does not import at its start: each costs every one of its starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "aetcd aiohttp asyncio circus cryptography google grpc httpx jinja2 matplotlib msgspec nats numpy openai "
    "opentelemetry pandas prometheus_client psutil pydantic scipy starlette tokenizers tornado transformers uvicorn "
    "yaml zmq"
)
WORKER = ["dynamo_local.worker.serve_dynamo", "dynamo_local.worker.process"]
RUNNER = ["dynamo_local.worker.serve_command", "dynamo_local.components.commands.runner", "dynamo_local.worker.process"]
CLI = "dynamo_local.cli."


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        pytest.param([f"{CLI}main", f"{CLI}status"], "", id="status"),
        pytest.param([f"{CLI}main", f"{CLI}workers"], "", id="scale"),
        pytest.param([f"{CLI}main", f"{CLI}serve"], "", id="serve --detach"),
        pytest.param([f"{CLI}main", f"{CLI}down"], "asyncio", id="down"),
        pytest.param(WORKER, "aetcd asyncio google grpc msgspec nats pydantic", id="worker"),
        pytest.param(RUNNER, "aetcd asyncio google grpc msgspec nats pydantic yaml", id="runner of a command"),
        pytest.param(
            ["circus.plugins", "dynamo_local.circus_plugins.guardian"],
            "asyncio circus psutil tornado yaml zmq",
            id="guardian",
        ),
        pytest.param(
            [f"{CLI}serve", "dynamo_local.arbiter.supervisor", "dynamo_local.circus_plugins.arbiter"],
            "asyncio circus msgspec prometheus_client psutil pydantic tornado yaml zmq",
            id="arbiter",
        ),
    ],
)
def test_a_process_imports_no_heavy_library_that_its_kind_does_not_need(modules: list[str], allowed: str) -> None:
    program = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert set(HEAVY.split()) & set(done.stdout.split()) - set(allowed.split()) == set()


def test_an_arbiter_that_only_serves_imports_nothing_that_plans_simulates_or_tokenises() -> None:
    """A graph's file is imported by its arbiter, too: what its components need once they run is not."""
    not_needed = (
        "jinja2 tokenizers dynamo_local.planner.choosing dynamo_local.planner.policies.slo.policy "
        "dynamo_local.engines.sim.scheduler"
    )
    imports = "graphs.disagg, dynamo_local.arbiter.launch, dynamo_local.arbiter.composition"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {imports}; print(*sys.modules)"],
        cwd=Path(__file__).parents[2] / "examples" / "llm",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(not_needed.split()) & set(done.stdout.split()) == set()
