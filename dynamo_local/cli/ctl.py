"""`dynamo ctl …`: circusctl with the right endpoint and with our commands loaded."""

from __future__ import annotations

import sys

import click

from dynamo_local.cli.common import await_socket, find_paths, namespace_option

SOCKET_TIMEOUT_S = 5.0


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@namespace_option
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@click.pass_context
def ctl(context: click.Context, namespace: str | None, args: tuple[str, ...]) -> None:
    """Run circusctl against the graph's arbiter: `dynamo ctl list`, `dynamo ctl status`, `dynamo ctl dynamo_status`.

    Without a command it is circusctl's own prompt; `dynamo ctl list --help` explains one.
    """
    if args[:1] in (("-h",), ("--help",)):
        click.echo(f"{context.get_help()}\n\nCommands:\n{_commands()}")
        return
    paths = find_paths(namespace)
    await_socket(paths, SOCKET_TIMEOUT_S)
    from circus import circusctl

    import dynamo_local.circus_plugins.commands  # noqa: F401  circusctl offers what its own process has imported

    sys.argv = ["circusctl", "--endpoint", paths.circus_endpoint, *args]
    sys.exit(circusctl.main())


def _commands() -> str:
    """circus's and ours, in a paragraph."""
    from circus.commands import get_commands

    import dynamo_local.circus_plugins.commands  # noqa: F401

    return click.wrap_text(", ".join(sorted(get_commands())), initial_indent="  ", subsequent_indent="  ")
