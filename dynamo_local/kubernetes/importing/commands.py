"""`dynamo import FILE`: what runs elsewhere, as a configuration for `dynamo serve -f`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import json_option
from dynamo_local.errors import BadInput
from dynamo_local.kubernetes.commands import print_json, print_notes, yaml_text

if TYPE_CHECKING:
    from dynamo_local.kubernetes.manifests import Note

MAX_BYTES = 8 << 20
KUBERNETES = "kubernetes"
_MANIFEST = re.compile(r"^(?:kind|apiVersion)\s*:|^\s*\{\s*\"(?:kind|apiVersion)\"", re.MULTILINE)
_KEYS = {"models": "llama-swap", "processes": "process-compose", "services": "docker-compose"}
_SERVER = re.compile(
    r"\bvllm\s+serve\b|-m\s+(?:vllm\.entrypoints|sglang\.)|\bsglang\s+serve\b|\bllama-server\b"
    r"|\b(?:docker|podman)\s+run\b"
)
_KINDS = (
    "a llama-swap configuration (`models:`), a process-compose file (`processes:`), a docker-compose file "
    "(`services:`), a shell script that starts vLLM, SGLang or llama-server, or a DynamoGraphDeployment"
)


@click.command("import")
@click.argument("words", nargs=-1, required=True, metavar=f"[{KUBERNETES}] FILE")
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="File to write.  [stdout]")
@click.option("--name", help="Which graph, where a manifest has several.")
@json_option
def import_(words: tuple[str, ...], output: Path | None, name: str | None, as_json: bool) -> None:
    """Make a configuration for this host of FILE (`-`: stdin), which another tool runs.

    FILE is a configuration of llama-swap, a process-compose or docker-compose file, a shell script, or a manifest with
    a DynamoGraphDeployment: recognised by its content, or said by `kubernetes`. It is read, never run. Stderr lists
    each thing that changes or is left out. A manifest that cannot run on one host is refused, with every reason.
    """
    if len(words) != 1 and (len(words) != 2 or words[0] != KUBERNETES):
        raise click.UsageError("give one FILE", click.get_current_context())
    text, source = _read(Path(words[-1]))
    kind = KUBERNETES if len(words) == 2 else kind_of(text, source)
    if kind == KUBERNETES:
        from dynamo_local.kubernetes.import_graph import import_graph, read_documents

        found = import_graph(read_documents(text, source, name), source)
        _write(found.sections, found.notes, found.name, output, as_json, f"DynamoGraphDeployment {found.name}")
        return
    sections, notes = imported(text, source, kind, os.environ)
    _write(sections, notes, None, output, as_json, f"{kind} file {source}")


def kind_of(text: str, source: str) -> str:
    """`kubernetes`, `llama-swap`, `process-compose`, `docker-compose` or `shell script`. Raises `BadInput`."""
    if not text.startswith("#!"):
        if _MANIFEST.search(text):
            return KUBERNETES
        for key, kind in _KEYS.items():
            if re.search(rf"^(?:{key}|\"{key}\"|'{key}')\s*:", text, re.MULTILINE):
                return kind
    if text.startswith("#!") or _SERVER.search(text):
        return "shell script"
    raise BadInput(f"{source}: its kind is not recognised; known are {_KINDS}")


def imported(
    text: str, source: str, kind: str, environ: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], Sequence[Note]]:
    """Sections and notes of a file that is no manifest. Raises `ConfigError` with the line, or `NotCarried`."""
    from dynamo_local.config.yaml_text import located_mapping
    from dynamo_local.core.secrets import is_secret_variable
    from dynamo_local.errors import ConfigError
    from dynamo_local.kubernetes.importing import containers, processes, script
    from dynamo_local.kubernetes.importing.imported_graph import ImportedGraph

    graph = ImportedGraph(source)
    env = {name: value for name, value in environ.items() if not is_secret_variable(name)}
    try:
        if kind == "shell script":
            script.import_script(graph, text)
            return graph.finished(), graph.notes
        document = located_mapping(text, source, what=f"a {kind} file")
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None
    how = {
        "llama-swap": processes.import_llama_swap,
        "process-compose": processes.import_process_compose,
        "docker-compose": containers.import_compose,
    }[kind]
    try:
        how(graph, document, env)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return graph.finished(), graph.notes


def _write(
    sections: Mapping[str, Any],
    notes: Sequence[Note],
    name: str | None,
    output: Path | None,
    as_json: bool,
    what: str,
) -> None:
    space = "" if name is None else f" -n {name or 'NAME'}"
    serve = f"dynamo serve -f {output if output is not None else 'FILE'}{space}"
    text = f"# From the {what}, by dynamo import. {serve}\n\n{yaml_text(sections)}"
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {output}: {error.strerror or error}") from None
    if as_json:
        print_json(notes, name=name, file=None if output is None else str(output), sections=sections)
        return
    click.echo(text.rstrip() if output is None else str(output))
    print_notes(notes)


def _read(file: Path) -> tuple[str, str]:
    """The text, and its name in messages."""
    source = "stdin" if str(file) == "-" else str(file)
    try:
        with click.open_file(str(file), "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise BadInput(f"{source} has more than {MAX_BYTES >> 20} MiB: no configuration")
    try:
        return data.decode(), source
    except UnicodeDecodeError as error:
        raise BadInput(f"{source} is not UTF-8 text (byte {error.start})") from None
