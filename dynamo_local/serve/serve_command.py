"""Entry point of a worker that is a command: `python -m dynamo_local.serve.serve_command --service-name X`.

The command is started before anything else is even imported: it takes its time to come up, and all that we need (etcd's
and NATS's clients, the statefile) is loaded beside it. Everything else is as in `serve_dynamo`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_local.errors import DynamoError
from dynamo_local.runtimes.child import Child, set_current_child
from dynamo_local.runtimes.launching import prepare

SERVICE_NAME = "--service-name"


def main(words: Sequence[str]) -> None:
    """Never returns: exits with the worker's code."""
    try:
        if len(words) != 2 or words[0] != SERVICE_NAME:
            raise SystemExit(f"usage: serve_command {SERVICE_NAME} NAME; workers are started by `dynamo serve`")
        name = words[1]
        section = _section(name, os.environ)
        launch, ports = prepare(section, os.environ)
        set_current_child(Child(launch, ports))
    except DynamoError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        sys.stderr.write(f"the command cannot be started: {error}\n")
        sys.exit(1)
    from dynamo_local.serve.serve_dynamo import run_as_worker

    run_as_worker(lambda: _worker(name, section))


def _section(name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    from dynamo_local.errors import ConfigError

    try:
        section = json.loads(environ["DYNAMO_SERVICE_CONFIG"])[name]
    except (KeyError, ValueError):
        raise ConfigError(f"the configuration has no command {name}; workers are started by `dynamo serve`") from None
    return {key: value for key, value in section.items() if key != "ServiceArgs"}


def _worker(name: str, section: Mapping[str, Any]) -> Any:
    from dynamo_local.runtimes.graph import one_service_graph
    from dynamo_local.serve.worker import WorkerProcess
    from dynamo_local.serve.worker_context import Identity

    graph = one_service_graph(name, section)
    return WorkerProcess(graph, graph.root, Identity.of(os.environ, name))


if __name__ == "__main__":
    main(sys.argv[1:])
