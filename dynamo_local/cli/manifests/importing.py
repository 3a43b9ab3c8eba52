"""`dynamo import kubernetes`: a manifest as a configuration for this host."""

from __future__ import annotations

from pathlib import Path

import click

from dynamo_local.cli.common import json_option
from dynamo_local.errors import BadInput


@click.group("import")
def import_() -> None:
    """Make a configuration for this host of what runs in another place."""


@import_.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="File to write.  [stdout]")
@click.option("--name", help="Which graph, where the file has several.")
@json_option
def kubernetes(file: Path, output: Path | None, name: str | None, as_json: bool) -> None:
    """Make a configuration of the DynamoGraphDeployment in FILE (`-`: stdin).

    Its components become commands, for `dynamo serve -f`. What does not carry over is listed on stderr; a graph that
    cannot run on one host is refused, with every reason.
    """
    from dynamo_local.cli.manifests.showing import print_json, print_notes, yaml_text
    from dynamo_local.manifests.importing.documents import read_documents
    from dynamo_local.manifests.importing.graph import import_graph

    source = "stdin" if str(file) == "-" else str(file)
    imported = import_graph(read_documents(_read(file), source, name), source)
    serve = f"dynamo serve -f {output if output is not None else 'FILE'} -n {imported.name or 'NAME'}"
    head = f"# From the DynamoGraphDeployment {imported.name}, by dynamo import. {serve}\n\n"
    text = head + yaml_text(imported.sections)
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {output}: {error.strerror or error}") from None
    if as_json:
        written = None if output is None else str(output)
        print_json(imported.notes, name=imported.name, file=written, sections=imported.sections)
        return
    click.echo(text.rstrip() if output is None else str(output))
    print_notes(imported.notes)


def _read(file: Path) -> str:
    try:
        with click.open_file(str(file), encoding="utf-8") as stream:
            return stream.read()
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not UTF-8 text (byte {error.start})") from None
