"""`dynamo doctor`: what is wrong with this host, and what puts it right."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dynamo_local import __version__
from dynamo_local.cli.common import SECONDS, complete_namespaces, json_option
from dynamo_local.core.doctor import CHECKS, SUBJECTS
from dynamo_local.core.doctor.findings import Finding, Verdict, examine, explanation_of, id_of, serving_fails
from dynamo_local.errors import EXIT_FAILED, EXIT_OK, BadInput

REPORT_SCHEMA, LIST_SCHEMA = "dynamo.doctor.v1", "dynamo.doctor.checks.v1"
"""The two answers of `--json`, by their schemas in docs/schemas. The number rises if a key is renamed or goes."""
DEADLINE_S = 20.0
"""For each read. A driver without persistence mode wakes each GPU for a second or two."""
COLOURS = {Verdict.PROBLEM: "red", Verdict.WARNING: "yellow", Verdict.OK: "green", Verdict.NOT_CHECKED: "cyan"}


@click.command()
@click.option("--list", "explain", is_flag=True, help="Explain all ids, and check nothing.")
@click.option("--all", "-a", "show_all", is_flag=True, help="Show also what is in order, with the evidence.")
@json_option
@click.option(
    "--model", "models", multiple=True, metavar="FOLDER", help="Check this model, a folder or a name in the cache."
)
@click.option("--port", "ports", multiple=True, type=click.IntRange(1, 65535), help="Port of the Frontend.  [8000]")
@click.option(
    "--bundle", type=click.Path(path_type=Path, dir_okay=False), help="Pack what a maintainer needs (tar.gz)."
)
@click.option(
    "--namespace",
    "-n",
    envvar="DYN_NAMESPACE",
    shell_complete=complete_namespaces,
    help="Namespace to pack.  [all that run or have logs]",
)
@click.option(
    "--deadline", "deadline_s", type=SECONDS, default=DEADLINE_S, show_default=True, help="Seconds for each read."
)
def doctor(
    explain: bool,
    show_all: bool,
    as_json: bool,
    models: tuple[str, ...],
    ports: tuple[int, ...],
    bundle: Path | None,
    namespace: str | None,
    deadline_s: float,
) -> int:
    """Check this host: GPUs, limits, disks, ports, leftovers, packages, engines.

    Each finding has an id, a verdict, the evidence, and the repair. Exit code 1: serving would fail.
    """
    if explain and bundle is not None:
        raise BadInput("--list checks nothing, and --bundle packs what was checked: say one of the two")
    if explain:
        click.echo(json.dumps(_explained(), indent=2) if as_json else "\n".join(_explanations()))
        return EXIT_OK
    from rich.console import Console

    from dynamo_local.cli.doctor.reading import FRONTEND_PORTS, Place, read

    place = Place(
        os.environ, Path.cwd(), models=tuple(dict.fromkeys(models)), ports=tuple(dict.fromkeys(ports)) or FRONTEND_PORTS
    )
    with Console(stderr=True).status("reading the host"):
        facts = read(place, deadline_s)
    findings = examine(CHECKS, facts)
    report = as_report(findings)
    click.echo(json.dumps(report, indent=2) if as_json else "\n".join(lines(findings, show_all=show_all)))
    if bundle is not None:
        _pack(bundle, report, facts["packages"], namespace)
    return EXIT_FAILED if serving_fails(findings) else EXIT_OK


def as_report(findings: Sequence[Finding]) -> dict[str, Any]:
    """The answer of `--json`."""
    return {
        "schema": REPORT_SCHEMA,
        "version": __version__,
        "serving_fails": serving_fails(findings),
        "counts": {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict},
        "findings": [asdict(finding) for finding in findings],
    }


def lines(findings: Sequence[Finding], *, show_all: bool) -> Iterator[str]:
    """For a person: problems first; what was not checked in one line for each reason; a sum."""
    shown = [Verdict.PROBLEM, Verdict.WARNING, *([Verdict.OK] if show_all else [])]
    width = max(len(finding.id) for finding in findings)
    for verdict in shown:
        for finding in findings:
            if finding.verdict is verdict:
                of = f"{finding.subject}: " if finding.subject else ""
                yield f"{click.style(f'{verdict:8}', COLOURS[verdict])} {finding.id:{width}}  {of}{finding.evidence}"
                if finding.repair:
                    yield f"{'':8} {'':{width}}  -> {finding.repair}"
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.verdict is Verdict.NOT_CHECKED:
            reasons.setdefault(finding.evidence, []).append(finding.id)
    for reason, ids in reasons.items():
        yield f"{click.style('not checked', COLOURS[Verdict.NOT_CHECKED])} ({reason}): {', '.join(dict.fromkeys(ids))}"
    counts = Counter(finding.verdict for finding in findings)
    said = "Serving would fail." if serving_fails(findings) else "Nothing here keeps a graph from serving."
    problems, warnings = counts[Verdict.PROBLEM], counts[Verdict.WARNING]
    yield (
        f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}, "
        f"{counts[Verdict.OK]} ok, {counts[Verdict.NOT_CHECKED]} not checked. {said}"
    )


def _explained() -> dict[str, Any]:
    checks = [
        {"id": id_of(check), "subject": subject, "explanation": explanation_of(check)}
        for subject, of in SUBJECTS.items()
        for check in of
    ]
    return {"schema": LIST_SCHEMA, "version": __version__, "checks": checks}


def _explanations() -> Iterator[str]:
    width = max(len(id_of(check)) for check in CHECKS)
    for subject, checks in SUBJECTS.items():
        yield click.style(subject, bold=True)
        for check in checks:
            yield f"  {id_of(check):{width}}  {explanation_of(check)}"


def _pack(path: Path, report: dict[str, Any], packages: Any, namespace: str | None) -> None:
    """Say what goes into the archive, then write it. Both go to stderr, because stdout may be JSON."""
    from dynamo_local.cli.doctor.bundle import contents, write
    from dynamo_local.state.raw import namespaces
    from dynamo_local.system.paths import Paths, log_root

    known = {*namespaces(os.environ), *_with_logs(log_root(os.environ))}
    if namespace and namespace not in known:
        there = f"there are: {', '.join(sorted(known))}" if known else "there is none"
        raise BadInput(f"no statefile and no log is of namespace {namespace!r}; {there}")
    names = {namespace} if namespace else known
    members = contents(report, packages, [Paths.found(name, os.environ) for name in sorted(names)], os.environ)
    for member in members:
        click.echo(f"{len(member.data):>10,} bytes  {member.name}: {member.what}", err=True)
    size = write(path, members)
    click.echo(f"written: {path} ({size:,} bytes). Read it before you pass it on.", err=True)


def _with_logs(folder: Path) -> set[str]:
    from dynamo_local.core.types import namespace_fault

    return {path.name for path in folder.glob("*/") if namespace_fault(path.name) is None}
