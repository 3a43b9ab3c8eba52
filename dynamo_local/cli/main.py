"""The `dynamo` command. Commands are imported when they are called: `dynamo status` must answer in 400 ms."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches

import click
from click.shell_completion import CompletionItem

from dynamo_local import __version__
from dynamo_local.errors import EXIT_FAILED, DynamoError
from dynamo_local.system import collector

COMMANDS = {
    "serve": ("dynamo_local.cli.serve:serve", "Run a graph on this host."),
    "down": ("dynamo_local.cli.down:down", "Leave: finish what streams, then end everything."),
    "ls": ("dynamo_local.cli.ls:ls", "List your graphs on this host."),
    "status": ("dynamo_local.cli.status:status", "Show the graph's workers."),
    "top": ("dynamo_local.cli.top:top", "Watch GPUs, workers, drains and the planner, live."),
    "dashboard": ("dynamo_local.dashboard.commands:dashboard", "Serve a page that shows the graph, live and past."),
    "history": ("dynamo_local.dashboard.commands:history", "Print the recorded history as a table, JSON or CSV."),
    "scale": ("dynamo_local.cli.workers:scale", "Add workers, or let some finish and leave."),
    "drain": ("dynamo_local.cli.workers:drain", "Let one worker finish and leave, or take that back."),
    "flip": ("dynamo_local.cli.workers:flip", "Have a prefill worker decode, or the other way round."),
    "apply": ("dynamo_local.cli.apply:apply", "Make what runs what a file says, dropping no request."),
    "sleep": ("dynamo_local.cli.workers:sleep", "Put a worker to sleep: its GPU is free, its process stays."),
    "wake": ("dynamo_local.cli.workers:wake", "Wake a worker that sleeps."),
    "restart": ("dynamo_local.cli.workers:restart", "Drain workers and start them again."),
    "planner": ("dynamo_local.cli.planner:planner", "Start, change and question the planner."),
    "events": ("dynamo_local.cli.events:events", "Show what happened to workers and servers, and why."),
    "logs": ("dynamo_local.cli.logs:logs", "Show what the processes wrote, by time."),
    "simulate": (
        "dynamo_local.cli.simulate:simulate",
        "Try a load, recorded or made, on a virtual fleet.",
    ),
    "doctor": ("dynamo_local.cli.doctor.command:doctor", "Check this host, and say what puts it right."),
    "profile": ("dynamo_local.cli.profile:profile", "Measure the engines of a configuration on this host."),
    "bench": ("dynamo_local.cli.bench:bench", "Send load to the graph that runs, and measure it."),
    "plan": ("dynamo_local.cli.plan:plan", "Find the smallest fleet that keeps targets, by a profile."),
    "export": ("dynamo_local.kubernetes.commands:export", "Write the graph as a manifest for Kubernetes."),
    "import": ("dynamo_local.kubernetes.importing.commands:import_", "Make a configuration of another tool's file."),
    "ctl": ("dynamo_local.cli.ctl:ctl", "Run circusctl against the graph's arbiter."),
    "config": ("dynamo_local.cli.config:config", "Help with configuration files."),
    "schema": ("dynamo_local.cli.schemas:schema", "Print the JSON schema of what `--json` prints."),
    "completion": ("dynamo_local.cli.completion:completion", "Print the completion of bash, zsh or fish."),
    "man": ("dynamo_local.cli.completion:man", "Show a manual page, or write all of them."),
}
"""name -> (module:attribute, one line for `--help`)."""


ELSEWHERE = {"stop": "down", "ps": "status", "run": "serve", "start": "serve", "list": "ls", "version": "--version"}
"""The words of other tools, and ours."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and imports one only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        with collector.paused():
            command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's own suggestions need all commands imported."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = [ELSEWHERE[name]] if name in ELSEWHERE else get_close_matches(name, COMMANDS, n=1)
            raise click.UsageError(f"no command {name!r}" + (f", did you mean {near[0]!r}?" if near else ""), ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Click's own completion imports all commands for their help."""
        names = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

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
    """Entry point of `dynamo`."""
    run(cli)


def run(command: click.Command) -> None:
    """A command: typed errors, and what the host refuses, become one line on stderr and their exit code."""
    try:
        code = command.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        click.echo(_in_a_line(error), err=True)
        sys.exit(error.exit_code)
    except DynamoError as error:
        click.echo(f"dynamo: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # `dynamo logs | head` closed the pipe: not an error
        sys.exit(EXIT_FAILED)
    except Exception as error:
        from dynamo_local.system.host_errors import host_refused

        refused = host_refused(error)
        if refused is None:
            raise
        click.echo(f"dynamo: {refused}", err=True)
        sys.exit(refused.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _in_a_line(error: click.ClickException) -> str:
    """Like every other error, and where to read on; asked for nothing, a group answers with its help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    message = error.format_message()
    if context is not None and message == context.get_help():
        return message
    said = " ".join(message.split()).rstrip(".")
    return f"dynamo: {said}" + ("" if context is None else f" (see `{context.command_path} --help`)")


if __name__ == "__main__":
    main()
