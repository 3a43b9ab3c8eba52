"""`dynamo ctl …`: circusctl with the right endpoint and with our commands loaded."""

from __future__ import annotations

import sys

import click

from dynamo_local.cli.common import find_paths, namespace_option
from dynamo_local.errors import NotRunning


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@namespace_option
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def ctl(namespace: str | None, args: tuple[str, ...]) -> None:
    """Run circusctl against the graph's arbiter: `dynamo ctl list`, `dynamo ctl status`, `dynamo ctl dynamo_status`."""
    paths = find_paths(namespace)
    if not paths.control_socket.exists():
        raise NotRunning(f"nothing runs in namespace {paths.namespace!r} (no {paths.control_socket})")
    from circus import circusctl

    import dynamo_local.circus_plugins.commands  # noqa: F401  circusctl offers what its own process has imported

    sys.argv = ["circusctl", "--endpoint", paths.circus_endpoint, *args]
    sys.exit(circusctl.main())
