"""PURE: from the arbiter's status and ended requests to the page's state, its points and its verdict.

Missing is None and never 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dynamo_local.core.fleet.states import traits_of
from dynamo_local.profile.repetitions import quantile

Json = dict[str, Any]
WINDOWS = ("minute", "hour", "day")
PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
TEXT_MAX = 2_000
"""A reason or a last word is cut there: a worker may die with megabytes on its lips."""
COLUMNS = (
    "requests_per_s",
    "tokens_per_s",
    *(f"{what}_{name}" for what in ("ttft", "itl") for name, _ in PERCENTILES),
    "waiting",
    "running",
    "kv_use",
    "kv_hit_rate",
    "kept",
    "demand",
    "forecast_low",
    "forecast",
    "forecast_high",
    "capacity",
    "gpus_used",
)
"""Columns that each point has. Beside them `workers_COMPONENT` for each component. Latencies are in milliseconds."""


def cut(text: Any, longest: int = TEXT_MAX) -> str | None:
    """The text, cut."""
    if text is None:
        return None
    found = str(text)
    return found if len(found) <= longest else f"{found[:longest]}…"


def state_of(
    graph: Json | None, *, alive_since_s: float | None, adopted: bool, why: str | None, extra: Mapping[str, Any]
) -> Json:
    """STATE. Without a status (`graph` None) nothing ran yet. `extra` has what the status does not: devices' memory,
    strangers, last words, the history's trouble."""
    graph = graph or {}
    devices: Mapping[str, Json] = extra.get("devices") or {}
    words: Mapping[str, str] = extra.get("last_words") or {}
    workers = {str(each["watcher_name"]): each for each in graph.get("workers") or ()}
    ours = {each.get("pid") for each in workers.values()}
    shown = {name: _worker(each, words.get(name)) for name, each in workers.items()}
    return {
        "namespace": graph.get("namespace"),
        "run_id": graph.get("run_id"),
        "run_state": graph.get("state"),
        "verdict": verdict(graph, alive=alive_since_s is not None, why=why, history=extra.get("history")),
        "arbiter": {"alive": alive_since_s is not None, "since": alive_since_s, "adopted": adopted, "why": why},
        "targets": _targets(graph),
        "planner": _planner(graph.get("planner")),
        "frontend_url": graph.get("frontend_url"),
        "prefill_queue": graph.get("prefill_queue"),
        "models": [{**each, "why": cut(each.get("why"))} for each in graph.get("models") or ()],
        "components": graph.get("components") or {},
        "notes": [cut(each.get("text")) for each in (graph.get("notes") or ())][-20:],
        "gpus": [_gpu(each, workers, ours, devices.get(str(each["uuid"])) or {}) for each in graph.get("gpus") or ()],
        "workers": shown,
    }


def _worker(worker: Json, last_words: str | None) -> Json:
    name, load = str(worker["watcher_name"]), worker.get("load")
    return {
        "name": name,
        "component": worker.get("component"),
        "role": worker.get("role"),
        "state": worker.get("state"),
        "trouble": _is_trouble(worker),
        "since": worker.get("since"),
        "pid": worker.get("pid"),
        "load": load,
        "restarts": worker.get("restarts"),
        "reason": cut(worker.get("reason")),
        "drain": worker.get("drain"),
        "standby": worker.get("standby"),
        "outdated": worker.get("outdated"),
        "last_words": cut(last_words),
        "gpus": worker.get("gpus") or [],
    }


def _is_trouble(worker: Json) -> bool:
    traits = traits_of(str(worker.get("state")))
    return bool(worker.get("reason")) and not (traits.serves or traits.gone or traits.standby)


def _gpu(gpu: Json, workers: Mapping[str, Json], ours: Collection[int | None], device: Json) -> Json:
    worker = workers.get(str(gpu.get("worker")))
    drain = (worker or {}).get("drain") or {}
    return {
        "uuid": gpu["uuid"],
        "index": gpu.get("index"),
        "name": gpu.get("name"),
        "worker": gpu.get("worker"),
        "component": (worker or {}).get("component"),
        "role": (worker or {}).get("role"),
        "model": (worker or {}).get("model"),
        "state": gpu.get("state"),
        "worker_state": (worker or {}).get("state"),
        "reason": cut(gpu.get("reason")),
        "sleepers": gpu.get("sleepers") or [],
        "strangers": strangers(device, ours),
        "allocated": allocated(device, ours),
        "used": device.get("used"),
        "total": device.get("total"),
        "utilisation": device.get("utilisation"),
        "drain_left_s": drain.get("eta_s") if drain.get("eta_s") is not None else drain.get("deadline_s"),
    }


def strangers(device: Json, ours: Collection[int | None]) -> list[Json]:
    """The device's processes that are none of ours."""
    return [
        {"pid": each["pid"], "name": cut(each["name"], 200), "bytes": each["bytes"]}
        for each in device.get("processes") or ()
        if not _is_ours(each, ours)
    ]


def allocated(device: Json, ours: Collection[int | None]) -> int | None:
    """Bytes that our workers have allocated there, those asleep included; None where a process's share is unknown."""
    if device.get("processes") is None:
        return None
    found = [each["bytes"] for each in device["processes"] if _is_ours(each, ours)]
    return None if None in found else sum(found)


def _is_ours(process: Json, ours: Collection[int | None]) -> bool:
    """Whether it is a worker's. A worker's engine is in the worker's session."""
    return process["pid"] in ours or process.get("session") in ours


def _targets(graph: Json) -> Json:
    planner = graph.get("planner") or {}
    options, kept = planner.get("options") or {}, graph.get("targets") or {}
    return {
        "ttft_ms": kept.get("ttft_ms", options.get("ttft_ms")),
        "itl_ms": kept.get("itl_ms", options.get("itl_ms")),
        "target": options.get("target"),
    }


def _planner(planner: Json | None) -> Json | None:
    if planner is None:
        return None
    names = ("state", "no_operation", "trouble", "adjusting", "next_decision_s", "waiting_for_gpus", "fixed_fleet")
    found: Json = {name: planner.get(name) for name in names}
    found["trouble"] = cut(found["trouble"])
    found["policy"] = (planner.get("options") or {}).get("policy")
    last = planner.get("last_decision")
    found["last_decision"] = None if last is None else {"t": last.get("wall_s"), "title": decision_title(last)}
    return found


# --- verdict


def verdict(graph: Json, *, alive: bool, why: str | None = None, history: str | None = None) -> Json:
    """The line at the top: is it well, and if not, what is wrong, with a link to where."""
    problems = list(_problems(graph, alive=alive, why=why))
    if history is not None:
        problems.append({"text": f"The history: {cut(history)}", "link": "#time"})
    kept = graph.get("targets") or {}
    shares = {window: (kept.get(window) or {}).get("share") for window in WINDOWS}
    fixed = (graph.get("planner") or {}).get("fixed_fleet") or {}
    return {
        "ok": not problems,
        "text": problems[0]["text"] if problems else _well(shares, graph),
        "problems": problems,
        "kept": shares,
        "gpu_hours": {
            "used": fixed.get("gpu_hours"),
            "fixed": fixed.get("fixed_gpu_hours"),
            "ratio": fixed.get("gpu_hours_ratio"),
            "hours": fixed.get("hours"),
        },
    }


def _problems(graph: Json, *, alive: bool, why: str | None) -> Iterable[Json]:
    if not alive:
        yield {"text": f"The arbiter does not answer: {cut(why) or 'no graph runs in this namespace'}", "link": "#time"}
        return
    for line in graph.get("missing") or ():
        yield {"text": f"Missing: {cut(line)}", "link": "#workers"}
    for worker in graph.get("workers") or ():
        if _is_trouble(worker) and worker.get("state") not in ("starting", "pending", "draining"):
            name = str(worker["watcher_name"])
            yield {"text": f"{name} is {worker['state']}: {cut(worker['reason'])}", "link": f"#worker={name}"}
    for gpu in graph.get("gpus") or ():
        if gpu.get("state") == "quarantined":
            yield {"text": f"GPU {gpu.get('index')} is quarantined: {cut(gpu.get('reason'))}", "link": "#gpus"}
    for server in graph.get("servers") or ():
        if server.get("failures"):
            text = f"{server['watcher_name']} is {server.get('state')}: {cut(server.get('reason'))}"
            yield {"text": text, "link": "#workers"}
    planner = graph.get("planner") or {}
    if planner.get("trouble"):
        yield {"text": f"The planner: {cut(planner['trouble'])}", "link": "#time"}
    yield from _missed(graph, planner)


def _missed(graph: Json, planner: Json) -> Iterable[Json]:
    """The last minute against the planner's target share, if requests ended in it."""
    minute = (graph.get("targets") or {}).get("minute") or {}
    target, share = (planner.get("options") or {}).get("target"), minute.get("share")
    wanted = 0.99 if target is None else float(target)
    if share is not None and share < wanted:
        missed = {name: count for name, count in (minute.get("missed") or {}).items() if count}
        most = max(missed, key=lambda name: missed[name], default=None)
        cause = "" if most is None else f"; most of the others: {str(most).replace('_', ' ')}"
        text = f"{100 * share:.1f} % of {minute['requests']} requests kept their targets in the last minute{cause}"
        yield {"text": text, "link": "#requests=failed"}


def _well(shares: Mapping[str, float | None], graph: Json) -> str:
    if graph.get("state") not in ("ready", None):
        return f"The graph is {graph['state']}."
    share = shares.get("minute")
    if share is None:
        return "All is well. No request ended in the last minute."
    return f"All is well. {100 * share:.1f} % of the requests kept their targets in the last minute."


# --- points


def percentile(values: Sequence[float], share: float) -> float | None:
    """None without values."""
    return quantile(values, share) if values else None


def point_of(graph: Json, requests: Sequence[Json], window_s: float) -> dict[str, float | None]:
    """The columns of one second. `requests` ended within the last `window_s`. Without any, the arbiter's own figures
    of the last minute stand in."""
    v: dict[str, float | None] = dict.fromkeys(COLUMNS)
    served = [each for each in (graph.get("components") or {}).values() if each]
    frontend: Json = max(served, key=lambda each: each.get("requests_per_s") or 0.0, default={})
    for what in ("ttft", "itl"):
        times = [1e3 * each[f"{what}_s"] for each in requests if each.get(f"{what}_s") is not None]
        for name, share in PERCENTILES:
            v[f"{what}_{name}"] = _rounded(percentile(times, share))
        if not requests:
            v[f"{what}_p50"] = (frontend.get(f"{what}_ms") or {}).get("p50")
    if requests:
        v["requests_per_s"] = round(len(requests) / window_s, 3)
        v["tokens_per_s"] = round(sum(each.get("tokens") or 0 for each in requests) / window_s, 3)
        judged = [each for each in requests if each.get("missed") is not None]
        v["kept"] = round(sum(not each["missed"] for each in judged) / len(judged), 4) if judged else None
        prompts = [each for each in requests if each.get("prompt_tokens") and each.get("cached_tokens") is not None]
        whole = sum(each["prompt_tokens"] for each in prompts)
        v["kv_hit_rate"] = round(sum(each["cached_tokens"] for each in prompts) / whole, 4) if whole else None
    else:
        v["requests_per_s"], v["tokens_per_s"] = frontend.get("requests_per_s"), frontend.get("tokens_per_s")
        v["kept"] = ((graph.get("targets") or {}).get("minute") or {}).get("share")
    return v | _loads(graph) | _forecast(graph)


def _loads(graph: Json) -> dict[str, float | None]:
    workers = graph.get("workers") or ()
    loads = [each["load"] for each in workers if each.get("load")]
    shares = [each["gpu_cache_usage_perc"] for each in loads if each.get("kv_total_blocks")]
    known = [share for share in shares if share is not None]
    queue = (graph.get("prefill_queue") or {}).get("pending")
    waiting = [each["num_requests_waiting"] for each in loads if each.get("num_requests_waiting") is not None]
    found: dict[str, float | None] = {
        "waiting": sum(waiting) + (queue or 0) if waiting or queue is not None else None,
        "running": max((each.get("request_active_slots") or 0 for each in loads), default=None) if loads else None,
        "kv_use": round(sum(known) / len(known), 4) if known else None,
        "gpus_used": sum(each.get("state") == "held" for each in graph["gpus"]) if graph.get("gpus") else None,
    }
    for component in dict.fromkeys(str(each["component"]) for each in workers):
        of = (each for each in workers if each["component"] == component)
        found[f"workers_{component}"] = sum(traits_of(str(each["state"])).serves for each in of)
    engines = [each for each in loads if each.get("kv_total_blocks")]
    if engines:
        found["running"] = sum(each.get("request_active_slots") or 0 for each in engines)
    return found


def _forecast(graph: Json) -> dict[str, float | None]:
    """Demand, forecast and capacity of the planner's last decision, in requests per second."""
    last = (graph.get("planner") or {}).get("last_decision")
    if last is None:
        return {}
    from dynamo_local.planner.records.figures import window_figures

    figures = window_figures(last) or {}
    capacity = [
        figures.get(f"engine_{role}_capacity_requests_per_second", math.nan) * max(1.0, _pool(last, role) or math.nan)
        for role in ("prefill", "decode")
    ]
    numbers: Mapping[str, Any] = {}
    for reason in (last.get("decision") or {}).get("reasons") or ():
        if "low_requests_per_second" in reason["numbers"]:
            numbers = reason["numbers"]
    known = [each for each in capacity if each is not None and math.isfinite(each)]
    return {
        "demand": _rounded(figures.get("observed_requests_per_second")),
        "forecast": _rounded(figures.get("predicted_requests_per_second", numbers.get("expected_requests_per_second"))),
        "forecast_low": _rounded(numbers.get("low_requests_per_second")),
        "forecast_high": _rounded(numbers.get("high_requests_per_second")),
        "capacity": _rounded(min(known)) if known else None,
    }


def _pool(decision: Json, role: str) -> float | None:
    pool = ((decision.get("inputs") or {}).get("fleet") or {}).get(role) or {}
    ready = pool.get("ready") if isinstance(pool, dict) else None
    return float(len(ready)) if isinstance(ready, list) else ready if isinstance(ready, int | float) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


# --- marks


def decision_title(record: Mapping[str, Any]) -> str:
    """`PrefillWorker hold (floor), VllmWorker +1 (scale up)`"""
    reasons = (record.get("decision") or {}).get("reasons") or ()
    parts = []
    for reason in reasons:
        step = f"{reason['step']:+d}" if reason.get("step") else "hold"
        parts.append(f"{reason.get('component')} {step} ({str(reason.get('rule')).replace('_', ' ')})")
    return ", ".join(parts)


def decision_mark(record: Mapping[str, Any], words: str | None) -> Json:
    """A decision of the planner: rule, numbers, and what would have made it decide otherwise."""
    reasons = (record.get("decision") or {}).get("reasons") or ()
    refused = any(each.get("outcome") == "refused" for each in (record.get("outcomes") or {}).values())
    acts = any(each.get("step") for each in reasons)
    return {
        "t": record["wall_s"],
        "kind": "refused" if refused else "decision" if acts else "held",
        "worker": None,
        "title": decision_title(record),
        "reason": cut(words),
        "rule": ", ".join(str(each.get("rule")) for each in reasons) or None,
        "detail": {"cause": record.get("stimulus_id"), "outcomes": record.get("outcomes") or {}},
    }


KINDS = {
    "draining": "drain",
    "crashed": "crash",
    "faulted": "crash",
    "start_timed_out": "crash",
    "drain_timed_out": "crash",
    "flipping": "flip",
    "falling_asleep": "sleep",
    "sleeping": "sleep",
    "waking": "wake",
}
ALREADY_SAID = frozenset({"time", "seq", "watcher_name", "component", "event", "from", "to", "stimulus_id", "reason"})


def event_mark(record: Mapping[str, Any]) -> Json:
    """A change of a worker's state, or the begin or end of a run."""
    before, after = str(record.get("from")), str(record.get("to"))
    kind = KINDS.get(after, "action")
    name = str(record["watcher_name"])
    detail = {key: cut(value, 400) for key, value in record.items() if key not in ALREADY_SAID and value is not None}
    cause = record.get("stimulus_id")
    return {
        "t": record["time"],
        "kind": "run" if str(record["event"]).startswith("Run") else kind,
        "worker": name,
        "title": f"{name}: {after}" if before == after else f"{name}: {before} to {after}",
        "reason": cut(record.get("reason")),
        "rule": str(record["event"]),
        "detail": {**detail, **({} if cause is None else {"cause": str(cause)})},
    }
