"""A worker's entry point: `python -m dynamo_local.worker.serve_dynamo graphs.disagg:Frontend --service-name X`.

Everything else comes through the environment (`arbiter.deployment`), nothing secret through argv.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from dynamo_local.errors import EXIT_FAILED, ConfigError, DynamoError
from dynamo_local.system import collector, start_stages, tracing
from dynamo_local.system.executors import end_at_the_latest, end_now
from dynamo_local.system.host_errors import ensure_descriptors
from dynamo_local.system.prctl import die_as_asked
from dynamo_local.system.request_log import log_to_stderr

if TYPE_CHECKING:
    from dynamo_local.worker.process import WorkerProcess

log = logging.getLogger("dynamo_local.worker")


@click.command()
@click.argument("target", metavar="MODULE:SERVICE")
@click.option("--service-name", required=True)
def main(target: str, service_name: str) -> None:
    """Run one worker of a graph's service until it is asked to leave."""
    run_as_worker(lambda: _worker(target, service_name))


def run_as_worker(make: Callable[[], WorkerProcess]) -> NoReturn:
    """Make the worker and run it; ends the process with its exit code. Failures are logged."""
    die_as_asked(os.environ)
    start_stages.passed("interpreter")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    log_to_stderr(os.environ.get("DYN_LOG", "INFO").upper())
    try:
        ensure_descriptors()
        with collector.paused():
            worker = make()
        identity = worker.identity
        tracing.begin(
            os.environ, identity.component, identity.namespace, identity.watcher_name, partial(log.warning, "%s")
        )
        code = _run(worker)
    except DynamoError as error:
        log.error("%s", error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except Exception:
        # Anything that is not one of our errors is a bug, ours or the user's: its traceback belongs in the log.
        log.exception("the worker failed")
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.exit(code)


def _worker(target: str, service_name: str) -> WorkerProcess:
    with collector.keeping():
        import uvloop  # noqa: F401

        from dynamo_local.sdk.loader import load_graph
        from dynamo_local.worker.context import Identity
        from dynamo_local.worker.process import WorkerProcess

    start_stages.passed("our imports")
    graph = load_graph(target, base_dir=Path.cwd())
    start_stages.passed("graph")
    service = graph.services.get(service_name)
    if service is None:
        raise ConfigError(f"{target} has no service {service_name!r}; its services: {', '.join(graph.services)}")
    return WorkerProcess(graph, service, Identity.of(os.environ, service_name))


def _run(worker: WorkerProcess) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            code = runner.run(worker.run())
        except DynamoError as error:
            log.error("%s", error)
            code = error.exit_code
        except Exception:
            log.exception("the worker failed")  # the user's code or ours: its traceback belongs in the log
            code = EXIT_FAILED
        tracing.close()
        # vLLM's threads and sockets outlive its shutdown, and Python waits for them. Seen: half a minute, until the
        # arbiter took a worker that had left in order for hung.
        if worker.hurried or "vllm" in sys.modules:
            end_now(code)
        end_at_the_latest(code)
        return code


if __name__ == "__main__":
    main()
