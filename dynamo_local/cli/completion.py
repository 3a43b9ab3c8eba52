"""`dynamo completion SHELL` and `dynamo man`: what a shell shows of the commands, both from Click's own records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from dynamo_local import __version__
from dynamo_local.errors import BadInput
from dynamo_local.system.host_errors import telling

PROGRAMS = ("dynamo", "dynamo-local")
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that completes commands, options, namespaces, components and workers.

    \b
    bash:  dynamo completion bash > ~/.local/share/bash-completion/completions/dynamo
    zsh:   dynamo completion zsh > ~/.zfunc/_dynamo      (a folder of $fpath)
    fish:  dynamo completion fish > ~/.config/fish/completions/dynamo.fish
    """
    root = click.get_current_context().find_root()
    program = root.info_name if root.info_name in PROGRAMS else PROGRAMS[0]
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(root.command, {}, program, f"_{program.replace('-', '_').upper()}_COMPLETE").source())


@click.command()
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.option("--to", "folder", type=click.Path(path_type=Path, file_okay=False), help="Write all pages here, as *.1.")
def man(words: tuple[str, ...], folder: Path | None) -> None:
    """Print the manual page of `dynamo`, or of a command: `dynamo man serve | man -l -`.

    With --to, all pages are written. `man` finds them in a folder `man1` of $MANPATH, such as ~/.local/share/man/man1.
    """
    root = click.get_current_context().find_root()
    pages = dict(_pages(root.command, click.Context(root.command, info_name=PROGRAMS[0])))
    if folder is None:
        name = "-".join((PROGRAMS[0], *words))
        if name not in pages:
            raise BadInput(f"there is no command {' '.join(words)!r}; `dynamo --help` lists them")
        click.echo(_roff(pages[name]))
        return
    with telling("the manual pages cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, context in pages.items():
            (folder / f"{name}.1").write_text(_roff(context) + "\n", encoding="utf-8")
    click.echo(f"{len(pages)} pages in {folder}")


def _pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """`dynamo-planner-set` and its context, for this command and all below it."""
    yield context.command_path.replace(" ", "-"), context
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        below = command.get_command(context, name)  # type: ignore[attr-defined]
        if below is not None and not below.hidden:
            yield from _pages(below, click.Context(below, info_name=name, parent=context))


def _roff(context: click.Context) -> str:
    command, path = context.command, context.command_path
    lines = [
        f'.TH "{path.replace(" ", "-").upper()}" "1" "" "dynamo-local {__version__}" "dynamo-local"',
        ".SH NAME",
        _escaped(f"{path.replace(' ', '-')} - {command.get_short_help_str(limit=120)}"),
        ".SH SYNOPSIS",
        f".B {_escaped(path)}",
        _escaped(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_description(command.help or ""),
    ]
    options = [
        record
        for param in command.get_params(context)
        if isinstance(param, click.Option) and (record := param.get_help_record(context)) is not None
    ]
    for title, records in (("OPTIONS", options), ("COMMANDS", _below(command, context))):
        if records:
            lines.append(f".SH {title}")
        for term, text in records:
            lines += [".TP", rf"\fB{_escaped(term)}\fR", _escaped(text)]
    return "\n".join(lines)


def _below(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    if not isinstance(command, click.Group):
        return []
    commands = ((name, command.get_command(context, name)) for name in command.list_commands(context))
    return [(name, each.get_short_help_str(limit=120)) for name, each in commands if each is not None]


def _description(text: str) -> Iterator[str]:
    """Paragraphs; one that begins with Click's mark for it keeps its lines."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.split("\f")[0].strip())):
        if number:
            yield ".PP"
        if paragraph.lstrip().startswith("\b"):
            yield from (".nf", _escaped(paragraph.lstrip().removeprefix("\b").strip("\n")), ".fi")
        else:
            yield _escaped(" ".join(paragraph.split()))


def _escaped(text: str) -> str:
    """Backslashes and hyphens as they are; a line that begins with a full stop or an apostrophe is no request."""
    return re.sub(r"(?m)^(?=[.'])", r"\\&", text.replace("\\", r"\e").replace("-", r"\-"))
