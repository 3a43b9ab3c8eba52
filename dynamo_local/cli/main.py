"""The `dynamo` command. Commands are imported when they are called: `dynamo status` must answer in 400 ms."""

from __future__ import annotations

import importlib
import sys

import click

from dynamo_local import __version__
from dynamo_local.errors import EXIT_FAILED, DynamoError

COMMANDS = {
    "serve": ("dynamo_local.cli.serve:serve", "Run a graph on this host."),
    "down": ("dynamo_local.cli.down:down", "Leave: finish what streams, then end everything."),
    "status": ("dynamo_local.cli.status:status", "Show the graph's workers."),
    "top": ("dynamo_local.cli.top:top", "Watch GPUs, workers, drains and the planner, live."),
    "scale": ("dynamo_local.cli.scale:scale", "Add workers, or let some finish and leave."),
    "drain": ("dynamo_local.cli.drain:drain", "Let one worker finish and leave, or take that back."),
    "restart": ("dynamo_local.cli.restart:restart", "Drain workers and start them again."),
    "planner": ("dynamo_local.cli.planner:planner", "Start, change and question the load planner."),
    "events": ("dynamo_local.cli.events:events", "Show what happened to the workers, and why."),
    "logs": ("dynamo_local.cli.logs:logs", "Show what the processes wrote."),
    "simulate": ("dynamo_local.cli.simulate:simulate", "Try a trace on a virtual fleet: planner, fixed, or a sweep."),
    "ctl": ("dynamo_local.cli.ctl:ctl", "Run circusctl against the graph's arbiter."),
    "config": ("dynamo_local.cli.config:config", "Help with configuration files."),
}
"""name -> (module:attribute, one line for `--help`)."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and imports one only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="dynamo-local")
def cli() -> None:
    """Run a disaggregated LLM-serving graph on this host, without Kubernetes.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 nothing runs in that namespace, 4 the namespace is taken,
    5 a deadline passed.
    """


def main() -> None:
    """Entry point: typed errors become one line on stderr and their exit code, never a traceback."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DynamoError as error:
        click.echo(f"dynamo: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # `dynamo logs | head`: nobody reads any more, which is no failure of ours
        sys.exit(EXIT_FAILED)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
