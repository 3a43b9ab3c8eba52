"""The changes of a `dynamo apply`: the difference between the running graph and a file, as a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from dynamo_local.core.secrets import MASK, is_secret_key, mask_config, mask_env
from dynamo_local.core.types import GraphSpec, ServiceSpec

PLANNER_AT_START = ("log_dir", "environment", "virtual_keys")
"""Options that a planner takes when it starts."""
LIVE_HOST_KEYS = frozenset({"health_bound_s", "restart"})
"""Keys of the section `Host` that a running arbiter can change."""
AT_START = "is chosen when the graph is started; `dynamo down`, then `dynamo serve`"


@dataclass(frozen=True, slots=True)
class Described:
    """A deployment as a file and its graph describe it. `host` is the section `Host`.

    `planner` are all of the planner's options by name, none where there is no such section; `planner_starts`: the
    file wants one to plan.
    """

    graph: GraphSpec
    host: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    planner_starts: bool = False


@dataclass(frozen=True, slots=True)
class Live:
    """The running graph now, beyond its description: workers by component, and the planner's options.

    `planned` are components whose number of workers a planner decides. `planner_by_flag`: the command line of
    `dynamo serve` said whether there is one, and no file does.
    """

    workers: Mapping[str, int]
    planner: Mapping[str, Any] = field(default_factory=dict)
    planned: frozenset[str] = frozenset()
    planner_state: str = "stopped"
    planner_by_flag: bool = False


class Absent(NamedTuple):
    """There is no such key, or no such component."""


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """One line of it: `VllmWorker.sim.speed` was `before`, and is to be `after`. Either may be `ABSENT`."""

    path: tuple[str, ...]
    before: Any
    after: Any

    def shown(self) -> dict[str, Any]:
        """As it may be printed: secrets masked, what is absent is None."""
        return {"what": ".".join(self.path), "before": self._shown(self.before), "after": self._shown(self.after)}

    def _shown(self, value: Any) -> Any:
        if isinstance(value, Absent):
            return None
        key = self.path[-1]
        if "envs" in self.path[:-1]:
            return mask_env({key: str(value)})[key]
        if any(is_secret_key(part) for part in self.path[1:-1]):
            return MASK
        return mask_config({key: value})[key]


@dataclass(frozen=True, slots=True)
class Differences:
    """All of it. `renewed` are components whose workers need new processes, `counts` how many of which there are to be.

    `refused` says what cannot be applied to a graph that runs, each with the reason; `notes` what is left as it is.
    """

    lines: tuple[Difference, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renewed: frozenset[str] = frozenset()
    counts: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def touched(self) -> tuple[str, ...]:
        """Components to whose workers something happens."""
        return tuple(dict.fromkeys((*self.added, *self.removed, *sorted(self.renewed), *self.counts)))


def differences(running: Described, wanted: Described, live: Live) -> Differences:
    """The steps from the first to the second, or all reasons why that cannot be."""
    before = {spec.name: spec for spec in running.graph.services}
    after = {spec.name: spec for spec in wanted.graph.services}
    added = tuple(name for name in after if name not in before)
    removed = tuple(name for name in before if name not in after)
    both = [(before[name], after[name]) for name in after if name in before]
    lines = [Difference((name,), ABSENT, _summary(after[name].workers)) for name in added]
    lines += [Difference((name,), _summary(live.workers.get(name, 0)), ABSENT) for name in removed]
    renewed: set[str] = set()
    counts = {name: after[name].workers for name in added}
    notes: list[str] = []
    for old, new in both:
        options = list(_of_process(old, new))
        lines += [*options, *_of_deadlines(old, new)]
        if options:
            renewed.add(new.name)
        count, note = _count(old, new, live)
        if count is not None:
            lines.append(count)
            counts[new.name] = new.workers
        notes += [note] if note else []
    planner = list(_of_planner(running, wanted, live))
    host = list(_leaves(("Host",), running.host, wanted.host))
    refused = [
        *_refused_graph(running.graph, wanted.graph, before, after),
        *_refused_host(host),
        *_refused_planner(planner, live),
    ]
    return Differences(
        (*lines, *planner, *host), added, removed, frozenset(renewed), counts, tuple(refused), tuple(notes)
    )


def _summary(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def _of_process(old: ServiceSpec, new: ServiceSpec) -> Iterator[Difference]:
    """Differences in the settings that a worker reads when it starts."""
    name = new.name
    yield from _leaves((name,), old.config, new.config)
    yield from _leaves((name, "ServiceArgs", "envs"), old.envs, new.envs)
    kept = {guest.name: guest for guest in old.guests}
    for guest in new.guests:
        if guest.name in kept:
            yield from _leaves((guest.name,), kept[guest.name].config, guest.config)
    for key in ("gpu", "cpu", "memory"):
        yield from _leaf((name, "ServiceArgs", "resources", key), old.resources, new.resources, key)


def _of_deadlines(old: ServiceSpec, new: ServiceSpec) -> Iterator[Difference]:
    if old.sharing is not None and new.sharing is not None:
        yield from _leaves((new.name, "ServiceArgs", "sharing"), asdict(old.sharing), asdict(new.sharing))
    for key in ("start_deadline_s", "drain_deadline_s", "flippable"):
        yield from _leaf((new.name, "ServiceArgs", key), old, new, key)


def _leaf(path: tuple[str, ...], old: object, new: object, key: str) -> Iterator[Difference]:
    before, after = (ABSENT if getattr(each, key) is None else getattr(each, key) for each in (old, new))
    if before != after:
        yield Difference(path, before, after)


def _leaves(path: tuple[str, ...], before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """Differences by key, in depth; lists as a whole."""
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if old == new and type(old) is type(new):
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _leaves((*path, str(key)), old, new)
        else:
            yield Difference((*path, str(key)), old, new)


def _count(old: ServiceSpec, new: ServiceSpec, live: Live) -> tuple[Difference | None, str | None]:
    """A planner's component changes only if the file's number does: an apply must not undo the planner's work."""
    now = live.workers.get(new.name, 0)
    if now == new.workers:
        return None, None
    if new.sharing is not None and old.workers == new.workers:
        return None, None  # the models' shares of the GPUs decide it
    if new.name in live.planned and old.workers == new.workers:
        return None, f"{new.name}: {now} workers run where the file starts {new.workers}: the planner decides that"
    return Difference((new.name, "ServiceArgs", "workers"), now, new.workers), None


def _of_planner(running: Described, wanted: Described, live: Live) -> Iterator[Difference]:
    if wanted.planner:
        yield from _leaves(("Planner",), live.planner, wanted.planner)
    if (goal := planner_goal(running, wanted, live)) is not None:
        yield Difference(("Planner", "state"), live.planner_state, goal)


def planner_goal(running: Described, wanted: Described, live: Live) -> str | None:
    """`running` or `stopped` where the file now says so and did not before; a pause by a person is left alone."""
    if live.planner_by_flag or running.planner_starts == wanted.planner_starts:
        return None
    goal = "running" if wanted.planner_starts else "stopped"
    return None if (live.planner_state == "stopped") == (goal == "stopped") else goal


def _refused_host(lines: list[Difference]) -> Iterator[str]:
    for key in dict.fromkeys(line.path[1] for line in lines):
        if key not in LIVE_HOST_KEYS:
            yield f"Host.{key} {AT_START}"


def _refused_planner(lines: list[Difference], live: Live) -> Iterator[str]:
    keys = [line.path[1] for line in lines if line.path[1] in PLANNER_AT_START]
    if keys and live.planner_state != "stopped":
        what = ", ".join(f"Planner.{key}" for key in keys)
        yield f"{what} can be chosen only when the planner starts: `dynamo planner stop`, and apply this again"


def _refused_graph(
    running: GraphSpec, wanted: GraphSpec, before: Mapping[str, ServiceSpec], after: Mapping[str, ServiceSpec]
) -> Iterator[str]:
    """Differences in the graph's code, which no file can change."""
    if running.namespace != wanted.namespace:
        yield f"the namespace is {running.namespace}, not {wanted.namespace}: it {AT_START}"
    of_models = _of_models(running) | _of_models(wanted)
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            if name in of_models:
                continue
            if (host := _host_of(name, running if old is None else wanted)) is not None:
                was, gets = f"runs in {host}'s processes", "workers of its own (colocate)"
                if old is not None:
                    was, gets = "has workers of its own", f"a place in {host}'s processes (colocate)"
                yield f"{name}: it {was}, and the file gives it {gets}: that {AT_START}"
            elif (old or new).runtime is None:  # type: ignore[union-attr]  # one of them is there
                which = "no longer has this service" if new is None else "has this service now, and had not"
                yield f"{name}: the graph's code {which}: that {AT_START}"
            continue
        for key in ("role", "runtime", "endpoints", "depends", "target"):
            if key == "depends" and of_models.issuperset({*old.depends} ^ {*new.depends}):
                continue
            if getattr(old, key) != getattr(new, key):
                was, is_to_be = _shown(getattr(old, key)), _shown(getattr(new, key))
                yield f"{name}: its {key} is {was}, not {is_to_be}: that is another graph, which {AT_START}"


def _of_models(graph: GraphSpec) -> set[str]:
    """Services of the models that share the GPUs: their workers, and the Processors in front of these."""
    workers = {spec.name for spec in graph.components if spec.sharing is not None}
    return workers | {spec.name for spec in graph.components if workers.intersection(spec.depends)}


def _host_of(name: str, graph: GraphSpec) -> str | None:
    """The service in whose processes that one runs."""
    return next((spec.name for spec in graph.services if any(guest.name == name for guest in spec.guests)), None)


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
