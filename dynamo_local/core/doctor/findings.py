"""Checks, their findings, and how checks run over the facts of a host. Pure.

A check is a function. Its name is the id of its findings (`gpu_driver`: `gpu-driver`), and its docstring explains that
id to a person. Its parameters name the facts that it needs: records that somebody else has read, or `Missing`.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.types import Missing


class Verdict(enum.StrEnum):
    """`PROBLEM`: serving would fail. `WARNING`: serving works, with a risk or a cost. `NOT_CHECKED` says why."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a check. `subject` is the thing that was checked, where there are several ("GPU 0").

    `evidence` is what was read, and where. `repair` is a command or a sentence, empty where nothing is to be repaired.
    """

    verdict: Verdict
    evidence: str
    repair: str = ""
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A result under the id of its check."""

    id: str
    verdict: Verdict
    subject: str
    evidence: str
    repair: str


Results = Iterable[Result]
Check = Callable[..., Results]


def ok(evidence: str, subject: str = "") -> Result:
    return Result(Verdict.OK, evidence, "", subject)


def warning(evidence: str, repair: str, subject: str = "") -> Result:
    return Result(Verdict.WARNING, evidence, repair, subject)


def problem(evidence: str, repair: str, subject: str = "") -> Result:
    return Result(Verdict.PROBLEM, evidence, repair, subject)


def not_checked(reason: str, subject: str = "") -> Result:
    return Result(Verdict.NOT_CHECKED, reason, "", subject)


def faults_or_ok(faults: Iterable[Result], evidence: str) -> Iterator[Result]:
    """The faults; if there are none, one `ok` with that evidence."""
    found = list(faults)
    yield from found or [ok(evidence)]


def id_of(check: Check) -> str:
    """`gpu-driver` for the function `gpu_driver`."""
    return check.__name__.replace("_", "-")


def explanation_of(check: Check) -> str:
    """The check's docstring, in one line."""
    return " ".join((inspect.getdoc(check) or "").split())


def facts_of(check: Check) -> tuple[str, ...]:
    """Names of the facts that the check needs."""
    return tuple(inspect.signature(check).parameters)


def examine(checks: Sequence[Check], facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Run the checks in order. A check is `not checked` if one of its facts is `Missing`; the reason is the fact's."""
    return tuple(
        Finding(id_of(check), result.verdict, result.subject, result.evidence, result.repair)
        for check in checks
        for result in _results(check, facts)
    )


def _results(check: Check, facts: Mapping[str, Any]) -> Results:
    needed = {name: facts[name] for name in facts_of(check)}
    for fact in needed.values():
        if isinstance(fact, Missing):
            return (not_checked(fact.reason),)
    return check(**needed)


def serving_fails(findings: Iterable[Finding]) -> bool:
    """Whether one of them is a problem."""
    return any(finding.verdict is Verdict.PROBLEM for finding in findings)
