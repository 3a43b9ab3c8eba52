"""Entry point of a worker that is a command: `python -S serve_command.py --service-name X`.

The command starts before any other import. The clients of etcd and NATS and the statefile are loaded a moment later.
Without `site` (-S), Python starts in a third of the time. The work of `site` is done once the command runs. The rest is
as in `serve_dynamo`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from dynamo_local.components.commands.child import Child

SERVICE_NAME = "--service-name"
HEAD_START_S = 2.0
"""How long the command may start before we load our own modules: enough for a light one, little for a heavy one."""


def main(words: Sequence[str]) -> None:
    """Never returns: exits with the worker's code."""
    if len(words) != 2 or words[0] != SERVICE_NAME:
        raise SystemExit(f"usage: serve_command.py {SERVICE_NAME} NAME; workers are started by `dynamo serve`")
    from dynamo_local.system.prctl import die_as_asked

    die_as_asked(os.environ)
    name = words[1]
    child, section = _started(name)
    child.let_it_start(HEAD_START_S)
    if sys.flags.no_site:
        import site

        site.main()
    from dynamo_local.worker.serve_dynamo import run_as_worker

    run_as_worker(lambda: _worker(name, section))


def _started(name: str) -> tuple[Child, dict[str, Any]]:
    """The command and its section; ends the process, saying why, where it cannot be started."""
    from dynamo_local.components.commands.child import Child, set_current_child
    from dynamo_local.components.commands.launch import prepare
    from dynamo_local.errors import DynamoError
    from dynamo_local.system.host_errors import ensure_descriptors

    try:
        ensure_descriptors()
        section = _section(name, os.environ)
        child = Child(*prepare(section, os.environ))
    except DynamoError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        sys.stderr.write(f"the command cannot be started: {error}\n")
        sys.exit(1)
    set_current_child(child)
    return child, section


def _section(name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    import json

    from dynamo_local.errors import ConfigError

    try:
        section = json.loads(environ["DYNAMO_SERVICE_CONFIG"])[name]
    except (KeyError, ValueError):
        raise ConfigError(f"the configuration has no command {name}; workers are started by `dynamo serve`") from None
    return {key: value for key, value in section.items() if key != "ServiceArgs"}


def _worker(name: str, section: Mapping[str, Any]) -> Any:
    from dynamo_local.components.commands.graph import graph_of_worker
    from dynamo_local.worker.context import Identity
    from dynamo_local.worker.process import WorkerProcess

    identity, sections = Identity.of(os.environ, name), {name: section}
    if identity.flips_to is not None:
        sections[identity.flips_to] = _section(identity.flips_to, os.environ)
    graph = graph_of_worker(sections)
    return WorkerProcess(graph, graph.root, identity)


if __name__ == "__main__":
    # Python puts a script's own folder first: remove it, so that its modules are not found by bare names. The folder of
    # the package goes last, after the standard library, where `site` puts it, too.
    sys.path[0:1] = []
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    main(sys.argv[1:])
