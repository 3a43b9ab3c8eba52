"""A shell script's servers. The script is read, never run."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_local.kubernetes.importing.containers import add_docker_run, is_docker_run
from dynamo_local.kubernetes.importing.imported_graph import ImportedGraph, Place
from dynamo_local.kubernetes.importing.servers import Server, add_server, program_of
from dynamo_local.kubernetes.importing.shell_commands import Line, commands, line_of

_SILENT = ("set", "wait", ":", "true", "shopt", "sleep", "echo", "printf", "exit")
"""Without an effect beyond the script."""


def import_script(graph: ImportedGraph, text: str) -> None:
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
            _export(line, exported, known, graph, place)
        elif program_of(line.words) is None and not is_docker_run(line.words):
            if name not in _SILENT:
                graph.left_out(place, "a command that starts no server: run it before dynamo serve, if it is needed")
        elif command.depth:
            graph.left_out(place, "a server within a loop, a condition or a function: write its command out")
        elif line.unknown is not None:
            graph.left_out(place, f"{line.unknown} is not known without running the script: write its value out")
        else:
            if command.redirected or command.piped:
                graph.changed(place, "its output goes to the log of its worker: dynamo logs")
            _server(graph, line, exported, place)


def _export(line: Line, exported: dict[str, str], known: dict[str, str], graph: ImportedGraph, place: Place) -> None:
    for word in line.words[1:]:
        name, equals, value = word.partition("=")
        if line.unknown is not None and "$" in value:
            graph.left_out(place, f"{line.unknown} is not known without running the script: export {name} yourself")
        elif equals:
            exported[name] = value
        elif name in known:
            exported[name] = known[name]


def _server(graph: ImportedGraph, line: Line, exported: Mapping[str, str], place: Place) -> None:
    env = {**exported, **line.env}
    for name in line.missing:
        graph.left_out(place, f"{name} is not known without running the script: export it before dynamo serve")
    where = Place(place.line, " ".join(line.words[:3]))
    found = program_of(line.words)
    if found is None:
        add_docker_run(graph, line.words, "", where)
    else:
        add_server(graph, Server(found[0].section, line.words, where, env))
