"""`dynamo status`: the first thing our users read. Answers from the arbiter's memory, in well under 400 ms."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from dynamo_local.cli.common import aligned, ask_arbiter, find_paths, json_option, namespace_option
from dynamo_local.cli.planner_words import follow_line, status_line
from dynamo_local.core.fleet.states import traits_of
from dynamo_local.core.traffic import kept_words
from dynamo_local.system.paths import Paths

COLUMNS = ("WORKER", "COMPONENT", "STATE", "PID", "GPUS", "LEASE", "UPTIME", "RUNNING", "WAITING", "KV", "NOTE")


@click.command()
@namespace_option
@json_option
@click.option("--watch", "-w", is_flag=True, help="Repeat every second until Ctrl-C.")
def status(namespace: str | None, as_json: bool, watch: bool) -> None:
    """Show each worker's component, state, pid, GPUs, lease, uptime and load."""
    paths = find_paths(namespace)
    if not watch:
        _show(paths, as_json)
        return
    try:
        while True:
            if not as_json:
                click.clear()
            _show(paths, as_json)
            time.sleep(1.0)
    except KeyboardInterrupt:
        return


def _show(paths: Paths, as_json: bool) -> None:
    graph = ask_arbiter(paths, "dynamo_status")["graph"]
    if as_json:
        click.echo(json.dumps(graph, indent=None if not sys.stdout.isatty() else 2))
    else:
        click.echo(render(graph, colour=sys.stdout.isatty()))


def render(graph: Mapping[str, Any], *, colour: bool = False) -> str:
    """The table and the lines above it."""
    head = [f"namespace {graph['namespace']}   run {graph['run_id']}   state {graph['state']}"]
    head += [f"missing   {line}" for line in graph.get("missing", ())]
    if graph.get("frontend_url"):
        head.append(f"frontend  {graph['frontend_url']}")
    head.append(f"etcd      {graph['etcd_endpoints']}   nats {graph['nats_server']}")
    if graph.get("etcd_shell_file"):
        head.append(f"          for etcdctl: . {graph['etcd_shell_file']}")
    head += [_server(server) for server in graph.get("servers", ()) if server["failures"]]
    if graph.get("metrics_url"):
        head.append(f"metrics   {graph['metrics_url']}")
    if page := graph.get("dashboard"):
        head.append(f"page      {page['url']}   its link: {page['link']}")
    elif graph.get("keeps_dashboard"):
        head.append("page      is starting")
    head += _queue(graph.get("prefill_queue"))
    head += _dispatch(graph["workers"])
    head += [f"targets   {line}" for line in kept_words(graph.get("targets"))]
    if line := status_line(graph.get("planner")):
        head.append(f"planner   {line}")
    if graph.get("follow"):
        head.append(f"follow    {follow_line(graph['follow'])}")
    head += _spares(graph.get("spares"))
    head += [_change(change) for change in graph.get("changes", ())]
    head += _inventory(graph.get("gpu_inventory"))
    head += [_task(task) for task in graph.get("tasks", ()) if not task["running"]]
    for uuid, why in (graph.get("quarantined_gpus") or {}).items():
        head.append(f"GPU       {uuid} is quarantined: {why}")
    head += [f"note      {note_line(note)}" for note in graph.get("notes", ())]
    lines = []
    for n, cells in enumerate(aligned([COLUMNS, *map(_row, present(graph["workers"]))])):
        if colour and n:
            cells[2] = click.style(cells[2], fg=traits_of(cells[2].rstrip()).colour)
        lines.append("  ".join(cells).rstrip())
    tables = (model_lines(graph.get("models") or ()), served_lines(graph.get("components")))
    return "\n".join([*head, "", *lines, *(line for table in tables if table for line in ("", *table))])


MODEL_COLUMNS = ("MODEL", "READY", "ASLEEP", "HELD", "WHY")


def model_lines(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of models that share the GPUs; nothing where none do."""
    if not models:
        return []
    rows = [
        (
            each["model"],
            f"{each['ready']}/{each['target']}",
            str(each["asleep"]),
            f"{each['held']} for {each['held_s']:.1f} s" if each["held"] else "-",
            each["why"] or "-",
        )
        for each in models
    ]
    return ["  ".join(cells).rstrip() for cells in aligned([MODEL_COLUMNS, *rows])]


SERVED_COLUMNS = ("LAST MINUTE", "REQUESTS/S", "TOKENS/S", "TTFT P50", "TTFT P95", "ITL P50", "ITL P95")


def served_lines(components: Mapping[str, Mapping[str, Any] | None] | None) -> list[str]:
    """A table of what each component served in the last minute; nothing where no component tells."""
    if not components or not any(components.values()):
        return []
    rows = [SERVED_COLUMNS, *((name, *_served_cells(figures)) for name, figures in components.items())]
    return ["  ".join((name, *(cell.strip().rjust(len(cell)) for cell in cells))) for name, *cells in aligned(rows)]


def _served_cells(figures: Mapping[str, Any] | None) -> tuple[str, ...]:
    if figures is None:
        return ("-",) * (len(SERVED_COLUMNS) - 1)
    rates = (_rate(figures["requests_per_s"]), _rate(figures["tokens_per_s"]))
    return (*rates, *(_ms(figures[f"{name}_ms"][share]) for name in ("ttft", "itl") for share in ("p50", "p95")))


def _rate(value: float) -> str:
    """Three digits: `0.03`, `4.21`, `35.2`, `1,280`."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _ms(value: float | None) -> str:
    """`8.4 ms`, `213 ms`, `12.4 s`."""
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.{0 if value >= 100 else 1}f} ms"


def present(workers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The workers without those that left, if their component has others: a restart or a drain leaves such a name."""
    rows = list(workers)
    here = {row["component"] for row in rows if not traits_of(row["state"]).gone}
    return [row for row in rows if not traits_of(row["state"]).gone or row["component"] not in here]


def note_line(note: Mapping[str, Any] | str) -> str:
    """`dynamo_VllmWorker was killed by SIGKILL (14:03:21)`, `… (3 times, 14:01:02 to 14:03:21)`.

    An arbiter of an older version, which still runs, gives the text alone.
    """
    if isinstance(note, str):
        return note
    first, last = clock_time(note["first_at"]), clock_time(note["last_at"])
    times = last if note["count"] == 1 else f"{note['count']} times, {first} to {last}"
    return f"{note['text']} ({times})"


def clock_time(at: float) -> str:
    """`14:03:21`, with the date where it is not today's; `at` is seconds since 1970."""
    time_at = datetime.fromtimestamp(at).astimezone()
    day = "" if time_at.date() == datetime.now().astimezone().date() else f"{time_at:%Y-%m-%d} "
    return f"{day}{time_at:%H:%M:%S}"


def _spares(reported: Mapping[str, Any] | None) -> list[str]:
    """`spares    vllm: dynamo_spare warm, 596 MiB, pid 4711`, and why the latest failed."""
    if reported is None:
        return []
    lines = [f"spares    {each['engine']}: {_spare(each)}" for each in reported["spares"]]
    if reported["reason"] is not None:
        again = "now" if reported["next_try_s"] is None else f"in {duration(reported['next_try_s'])}"
        lines.append(f"spares    the last one failed ({reported['reason']}); the next is started {again}")
    return lines or ["spares    none yet: the first is started when no worker is coming up"]


def _spare(spare: Mapping[str, Any]) -> str:
    memory = spare["memory_bytes"]
    held = "" if memory is None else f", {memory / 2**20:.0f} MiB"
    return f"{spare['watcher_name']} {spare['state']}{held}, pid {spare['pid'] or '-'}"


def _change(change: Mapping[str, Any]) -> str:
    """The line of a restart or an apply that is under way."""
    return f"change    {change['stimulus_id']} is under way, and has still to come to {', '.join(change['left'])}"


def _server(server: Mapping[str, Any]) -> str:
    """The line of an embedded etcd or NATS that failed lately."""
    times = f"{server['failures']} time{'s' * (server['failures'] != 1)}"
    if server["state"] == "running":
        return f"{server['kind']:<9} runs again; it failed {times}, last it {server['reason']}"
    again = "now" if server["next_try_s"] is None else f"in {duration(server['next_try_s'])}"
    return f"{server['kind']:<9} is down and started again {again}; it failed {times}, last it {server['reason']}"


def _task(task: Mapping[str, Any]) -> str:
    """The line of a task of the arbiter's own that died, and does not run now."""
    times = f"{task['deaths']} time{'s' * (task['deaths'] != 1)}"
    again = f"in {duration(task['again_s'])}" if (task["again_s"] or 0.0) >= 1.0 else "now"
    why = str(task["why"]).partition("\n")[0]
    return f"arbiter   its {task['task']} is down and started again {again}; it died {times}, last of {why}"


def _inventory(inventory: Mapping[str, Any] | None) -> list[str]:
    """A line if the GPU driver does not answer, so that scaling relies on an old reading of the devices."""
    if inventory is None or inventory["stale"] is None:
        return []
    return [f"GPUs      last seen {duration(inventory['age_s'])} ago, decisions go by that: {inventory['stale']}"]


def _queue(queue: Mapping[str, Any] | None) -> list[str]:
    """The prefill queue's line, with the entries that were given up: these need somebody's attention."""
    if queue is None:
        return []
    shown = {name: "-" if value is None else value for name, value in queue.items()}
    dead = f", {shown['dead_letters']} given up (dead letters)" if queue["dead_letters"] else ""
    return [f"prefill   {shown['pending']} waiting, {shown['outstanding']} outstanding{dead}"]


def _dispatch(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """`dispatch  12 prefills here, 30 in prefill workers; first token after 213 ms, estimated 198 ms; 2 refused`: of
    all workers together. Nothing where none has decided anything yet."""
    sums: Counter[str] = Counter()
    for worker in workers:
        for name, value in (worker.get("dispatch") or {}).items():
            head, _, rest = name.partition(".")
            sums[head] += value
            sums[f"{head}.{rest.partition('.')[0]}"] += value
    here, there = int(sums["prefills.local"]), int(sums["prefills.remote"])
    parts = [f"{here} prefills here, {there} in prefill workers"] if here or there else []
    if count := sums["first_tokens"]:
        seen_ms, thought_ms = (1000 * sums[f"first_token_{what}_s"] / count for what in ("seen", "estimated"))
        parts.append(f"first token after {seen_ms:.0f} ms, estimated {thought_ms:.0f} ms")
    for name, words in (("fallbacks", "by the seed's rule"), ("deferred", "deferred"), ("refused", "refused")):
        parts += [f"{int(sums[name])} {words}"] if sums[name] else []
    return [f"dispatch  {'; '.join(parts)}"] if parts else []


def _row(worker: Mapping[str, Any]) -> tuple[str, ...]:
    load = worker.get("load")
    return (
        worker["watcher_name"],
        ", ".join((worker["component"], *worker.get("guests", ()))),
        worker["state"],
        str(worker["pid"] or "-"),
        gpus_of(worker),
        worker["lease"] or "-",
        duration(worker["uptime_s"]),
        _of(load, "request_active_slots", "request_total_slots"),
        "-" if load is None else str(load["num_requests_waiting"]),
        _kv(load),
        _note(worker),
    )


def gpus_of(worker: Mapping[str, Any]) -> str:
    """`0,1`; `(0)` for one that sleeps there, and holds it no more; `-` without any."""
    asleep = (worker.get("standby") or {}).get("gpus")
    return f"({','.join(asleep)})" if asleep else ",".join(worker["gpus"]) or "-"


def _kv(load: Mapping[str, Any] | None) -> str:
    """`-` where it is not known, or where the worker has no KV cache."""
    share = load["gpu_cache_usage_perc"] if load is not None and load["kv_total_blocks"] else None
    return "-" if share is None else f"{share:.0%}"


def _note(worker: Mapping[str, Any]) -> str:
    restarts = worker.get("restarts") or 0
    parts = (
        "its old configuration" if worker.get("outdated") and worker["pid"] else "",
        worker.get("reason") or "",
        drain_note(worker.get("drain")),
        f"{restarts} restart{'s' * (restarts != 1)}" if restarts else "",
    )
    return "; ".join(part for part in parts if part)


def drain_note(drain: Mapping[str, Any] | None) -> str:
    """`3 requests left (4120 tokens), about 12s, at most 9m48s`; "" if it does not drain. An unknown count is named.

    An estimate below a second is left out: it is a guess of a load that is a second old.

    `eta_s` is the estimate, `deadline_s` the time after which its session is ended; both in seconds from now.
    """
    if drain is None:
        return ""
    requests, tokens = drain.get("left_requests"), drain.get("left_tokens")
    left = "unknown what is left" if requests is None else f"{requests} request{'s' * (requests != 1)} left"
    if tokens:
        left += f" ({tokens} tokens)"
    eta_s, deadline_s = drain.get("eta_s"), drain.get("deadline_s")
    parts = (
        left,
        unread_note(drain),
        "" if eta_s is None or eta_s < 1.0 else f"about {duration(eta_s)}",
        "" if deadline_s is None else f"at most {duration(max(0.0, deadline_s))}",
    )
    return ", ".join(part for part in parts if part)


def unread_note(reported: Mapping[str, Any]) -> str:
    """`5 answers that no client reads, the oldest for 42s`, of a drain or a load; "" where all are read."""
    unread = reported.get("unread")
    if not unread:
        return ""
    what = f"{unread} answer{'s' * (unread != 1)} that no client reads"
    return f"{what}, {'the oldest ' * (unread != 1)}for {duration(reported['unread_s'])}"


def _of(load: Mapping[str, Any] | None, part: str, whole: str) -> str:
    if load is None:
        return "-"
    return f"{load[part]}/{load[whole]}" if load[whole] else str(load[part])


def duration(seconds: float | None) -> str:
    """`42s`, `3m07s`, `5h02m`, `2d04h`; `-` if not running."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
