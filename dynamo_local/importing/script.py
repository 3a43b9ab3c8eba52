"""A shell script's servers. The script is read, never run."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_local.importing.containers import add_docker_run, is_docker_run
from dynamo_local.importing.draft import Draft, Place
from dynamo_local.importing.servers import Server, add_server, program_of
from dynamo_local.importing.shell import Line, commands, line_of

_SILENT = ("set", "wait", ":", "true", "shopt", "sleep", "echo", "printf", "exit")
"""Without an effect beyond the script."""


def import_script(draft: Draft, text: str) -> None:
    """Add the servers of a shell script; each other command that does something is named."""
    known: dict[str, str] = {}
    exported: dict[str, str] = {}
    for command in commands(text):
        line = line_of(command, {**known, **exported})
        place = Place(command.line, " ".join(word.text for word in command.words)[:60])
        if not line.words:
            known |= line.env
            exported |= {name: value for name, value in line.env.items() if name in exported}
            continue
        name = line.words[0]
        if name in ("export", "declare", "readonly", "local"):
            _export(line, exported, known, draft, place)
        elif program_of(line.words) is None and not is_docker_run(line.words):
            if name not in _SILENT:
                draft.left_out(place, "a command that starts no server: run it before dynamo serve, if it is needed")
        elif command.depth:
            draft.left_out(place, "a server within a loop, a condition or a function: write its command out")
        elif line.unknown is not None:
            draft.left_out(place, f"{line.unknown} is not known without running the script: write its value out")
        else:
            _server(draft, line, exported, place)


def _export(line: Line, exported: dict[str, str], known: dict[str, str], draft: Draft, place: Place) -> None:
    for word in line.words[1:]:
        name, equals, value = word.partition("=")
        if line.unknown is not None and "$" in value:
            draft.left_out(place, f"{line.unknown} is not known without running the script: export {name} yourself")
        elif equals:
            exported[name] = value
        elif name in known:
            exported[name] = known[name]


def _server(draft: Draft, line: Line, exported: Mapping[str, str], place: Place) -> None:
    env = {**exported, **line.env}
    for name in line.missing:
        draft.left_out(place, f"{name} is not known without running the script: export it before dynamo serve")
    where = Place(place.line, " ".join(line.words[:3]))
    found = program_of(line.words)
    if found is None:
        add_docker_run(draft, line.words, "", where)
    else:
        add_server(draft, Server(found[0].section, line.words, where, env))
