"""The command line of `dynamo serve`, and the graph and configuration that it names, loaded and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.checks import (
    FixedPort,
    check_access,
    check_common,
    check_dispatch,
    check_engines,
    check_sim_profiles,
    fixed_ports,
    insecure,
    taken_ports,
    with_flips,
)
from dynamo_local.arbiter.deployment import Settings
from dynamo_local.arbiter.profile_check import check_profile
from dynamo_local.components.commands.graph import check_commands, with_commands
from dynamo_local.components.targets import with_targets
from dynamo_local.config import resolve
from dynamo_local.config.loading import COMMON, Config, deep_merge, load_config, normalise, parse_overrides
from dynamo_local.config.models import GRAPHS, target_of
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.resolve import check_planner, planned_components, planner_config, planner_starts
from dynamo_local.core.fleet.backoff import RestartPolicy
from dynamo_local.core.fleet.fleet import StartPace
from dynamo_local.core.types import GraphSpec, lease_ttl_s
from dynamo_local.core.virtual import Layout
from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.sdk.loader import LoadedGraph, load_graph
from dynamo_local.system.gpus import pinning_disabled
from dynamo_local.system.paths import Paths

STARTS_AT_ONCE = 8
"""Workers of a host with eight GPUs start together."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The command line of `dynamo serve`, parsed only. `on_arbiter_death` is "end" or "keep".

    `target` is None if the file says everything: a graph of commands. `more_files` are laid over `file`, in order.
    `planner` is None if the configuration decides. `follow` is "virtual" or None, `follow_keys` "v1", "v0" or None.
    """

    target: str | None
    file: Path | None = None
    more_files: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()
    kept: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sections of an earlier command line of this run, below `overrides`."""
    namespace: str | None = None
    gpus: str | None = None
    start_deadline_s: float = 300.0
    drain_deadline_s: float = 600.0
    pass_env: tuple[str, ...] = ()
    on_arbiter_death: str | None = None
    adopt: bool = False
    replace: bool = False
    planner: bool | None = None
    follow: str | None = None
    follow_keys: str | None = None
    insecure: bool = False
    ttft_ms: float | None = None
    itl_ms: float | None = None
    base: str | None = None
    """YAML that was made for `--model`: `file` and `overrides` are laid over it."""
    reasons: tuple[str, ...] = ()
    """Why it is so: lines that are shown before the start."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked command line with its graph and configuration. GPUs are not read yet."""

    graph: GraphSpec
    config: Config
    settings: Settings
    paths: Paths
    gpus_option: str | None
    cwd: Path
    planner: PlannerConfig
    planner_starts: bool
    planner_flag: bool | None
    follow: Layout | None = None
    ports: tuple[FixedPort, ...] = ()
    notes: tuple[str, ...] = ()
    command_line: Mapping[str, Any] = field(default_factory=dict)
    """The sections that the command line says, `--ttft`, `--itl` and `--insecure` included."""


def understand(options: ServeOptions, environ: Mapping[str, str], cwd: Path, *, only_plan: bool = False) -> Request:
    """Load the graph and its configuration. Raises `BadInput` errors and changes nothing.

    With `only_plan` a fault of this host, which the plan's host may not have, becomes a note.
    """
    if options.adopt and options.replace:
        raise BadInput("--adopt takes the running workers back, --replace ends them: say one of the two")
    config = load_config(
        options.file,
        more=options.more_files,
        env=environ,
        overrides=options.overrides,
        base=options.base,
        kept=options.kept,
    )
    target = options.target
    if config.models:
        if target is not None and not target.startswith(f"{GRAPHS}:models"):
            raise BadInput(f"{target} and the section Models are two graphs: leave one of the two out")
        target = target_of(list(config.models))
    python = load_graph(target, base_dir=cwd) if target is not None else None
    try:
        return _understood(options, environ, cwd, python, config, only_plan=only_plan)
    except ConfigError as error:
        raise config.located(error) from None


def _understood(
    options: ServeOptions,
    environ: Mapping[str, str],
    cwd: Path,
    python: LoadedGraph | None,
    config: Config,
    *,
    only_plan: bool,
) -> Request:
    graph = with_commands(python, config, options.file)
    config = with_targets(graph, config, {"ttft": options.ttft_ms, "itl": options.itl_ms})
    said = _said(options)
    if options.insecure:
        said = insecure(graph, said)
        config = replace(config, sections=insecure(graph, config.sections))
    spec = resolve(graph, config, namespace=options.namespace)
    planner, starts = planner_config(graph, config), planner_starts(graph, config, flag=options.planner)
    damaged = None
    if starts:
        planned_components(spec)
        check_planner(planner, spec)
        check_profile(planner, spec, patient=True)
        if planner.history is not None:
            from dynamo_local.planner.choosing import history_of  # imports all policies

            _, damaged = history_of(planner)
    follow = _followed(options, spec, starts)
    spec = with_flips(graph, spec, config)
    if only_plan:
        check_sim_profiles(graph, spec, config)
    check_access(graph, spec, config, environ)
    ports = fixed_ports(graph, spec)
    notes = (
        *([] if damaged is None else [damaged]),
        *check_engines(graph, spec, config, only_plan=only_plan),
        *check_common(graph, config),
        *check_dispatch(graph, spec, config),
        *check_commands(graph, config, environ, only_plan=only_plan),
        *(map(str, taken_ports(ports)) if only_plan else ()),
    )
    return Request(
        graph=spec,
        config=config,
        settings=_settings(options, config, environ),
        paths=Paths.of(spec.namespace, environ),
        gpus_option=options.gpus if options.gpus is not None else config.host.gpus,
        cwd=cwd,
        planner=planner,
        planner_starts=starts,
        planner_flag=options.planner,
        follow=follow,
        ports=ports,
        notes=notes,
        command_line=said,
    )


def _said(options: ServeOptions) -> dict[str, Any]:
    targets = {name: value for name, value in (("ttft", options.ttft_ms), ("itl", options.itl_ms)) if value is not None}
    words = normalise(parse_overrides(options.overrides), "command line")
    return deep_merge(deep_merge(options.kept, {COMMON: targets} if targets else {}), words)


def _followed(options: ServeOptions, graph: GraphSpec, planner_starts: bool) -> Layout | None:
    """The layout of the keys that `--follow` names. Raises `BadInput` if the graph cannot follow."""
    if options.follow is None:
        if options.follow_keys is not None:
            raise BadInput("--follow-keys says where the keys of --follow are: say --follow virtual, too")
        return None
    if planner_starts:
        ours = (
            "--planner makes its own: say one of the two"
            if options.planner
            else "the configuration's Planner section starts one here: say --no-planner, or `enabled: false` there"
        )
        raise BadInput(
            f"--follow {options.follow} carries out another planner's decisions, and two planners would undo each "
            f"other's; {ours}"
        )
    try:
        planned_components(graph)
    except ConfigError as error:
        raise ConfigError(f"--follow {options.follow}: {str(error).removeprefix('Planner: ')}") from None
    return Layout(options.follow_keys or Layout.V1)


def _settings(options: ServeOptions, config: Config, environ: Mapping[str, str]) -> Settings:
    return Settings(
        start_deadline_s=options.start_deadline_s,
        drain_deadline_s=options.drain_deadline_s,
        lease_ttl_s=_lease_ttl_s(environ),
        pass_env=(*config.host.pass_env, *options.pass_env),
        pin_gpus=not pinning_disabled(environ),
        keep_on_arbiter_death=options.on_arbiter_death == "keep",
        health_bound_s=config.host.health_bound_s,
        unread_bound_s=config.host.unread_bound_s,
        restart_revoked=config.host.on_foreign_revoke == "restart",
        restart=RestartPolicy(**config.host.restart.model_dump()),
        pace=_pace(len(os.sched_getaffinity(0))),
        metrics_port=config.host.metrics_port,
        metrics_socket=config.host.metrics_socket,
        metrics_api_key=config.host.metrics_api_key,
        dashboard=config.host.dashboard,
        history=config.host.history,
        spares=config.host.spares,
    )


def _pace(cores: int) -> StartPace:
    """As many starts a second as there are cores; twice that, or eight, without a pause."""
    return StartPace(at_once=max(STARTS_AT_ONCE, 2 * cores), every_s=1.0 / cores)


def _lease_ttl_s(environ: Mapping[str, str]) -> int:
    try:
        return lease_ttl_s(environ)
    except ValueError as error:
        raise ConfigError(str(error)) from None
