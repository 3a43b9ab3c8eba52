"""`dynamo plan` with several profiles, of engines that differ in GPUs (tensor parallelism) or in settings. Pure.

Each profile gets its own smallest fleet (`sizing.plan`). The better one keeps the targets, with fewer GPUs; of equals
the one whose attainment is the highest where it is at its worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_local.profiles.measuring.document import Document
from dynamo_local.profiling.sizing import Engines, Planned


@dataclass(frozen=True, slots=True)
class Candidate:
    """A profile with its fleet. `settings` are what tells its engines from the others', by role."""

    engines: Engines
    planned: Planned
    settings: Mapping[str, Mapping[str, Any]]

    @property
    def words(self) -> str:
        """`decode: 2 GPUs, max_num_seqs 64`; empty where nothing differs."""
        return "; ".join(
            f"{role}: {', '.join(_said(name, value) for name, value in of.items())}"
            for role, of in self.settings.items()
            if of
        )


def ranked(found: Sequence[tuple[Engines, Planned]]) -> list[Candidate]:
    """The best first."""
    settings = differing([engines.document for engines, _ in found])
    candidates = [Candidate(*each, of) for each, of in zip(found, settings, strict=True)]
    return sorted(candidates, key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float, float]:
    planned = candidate.planned
    if not planned.attained:  # the best that there is, whatever it takes
        return True, -planned.best.metrics.attainment, planned.best.gpus
    return False, planned.best.gpus, -planned.lowest


def differing(documents: Sequence[Document | None]) -> list[dict[str, dict[str, Any]]]:
    """Of each profile, by role, `gpus` and the options that are not the same in all; of one that does not say what was
    measured, nothing."""
    told = [_told(document) for document in documents]
    known = [of for of in told if of is not None]
    names = {
        role: _different([of[role] for of in known if role in of]) for role in {role for of in known for role in of}
    }
    return [
        {role: {name: engine.get(name) for name in names[role]} for role, engine in (of or {}).items()} for of in told
    ]


def _different(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for engine in engines for name in engine})
    return [name for name in names if any(engine.get(name) != engines[0].get(name) for engine in engines)]


def _told(document: Document | None) -> dict[str, dict[str, Any]] | None:
    if document is None:
        return None
    return {role: {"gpus": engine.gpus, **engine.options} for role, engine in document.engines.items()}


def _said(name: str, value: Any) -> str:
    if name == "gpus":
        return f"{value} GPU{'' if value == 1 else 's'}"
    return f"{name} {'not set' if value is None else _plain(value)}"


def sections_of(candidate: Candidate, components: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What the configuration must say for these engines, by component: only what differs among the profiles."""
    found: dict[str, dict[str, Any]] = {}
    for role, settings in candidate.settings.items():
        section: dict[str, Any] = {}
        for name, value in settings.items():
            if name == "gpus":
                section["ServiceArgs"] = {"resources": {"gpu": value}}
            elif value is not None:
                _put(section, name.split("."), _plain(value))
        if section:
            found[components.get(role, role)] = section
    return found


def _put(section: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """`sim.max_num_seqs` as `sim: {max_num_seqs: …}`; vLLM's own as it spells them."""
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1].replace("_", "-") if len(path) == 1 else path[-1]] = value


def _plain(value: Any) -> Any:
    """A profile keeps numbers as floats, and an engine takes no 64.0 for 64."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def merged(section: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` into the section, whole."""
    found = dict(section)
    for name, value in more.items():
        old = found.get(name)
        found[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found
