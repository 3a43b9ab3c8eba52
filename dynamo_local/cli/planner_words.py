"""The planner's state and decisions in a line each. Reads JSON only: `dynamo status` must answer in 400 ms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

RUNG_WORDS = {
    "flip_to_decode": "by a flip from prefill",
    "flip_to_prefill": "by a flip from decode",
    "wake_1": "by a wake from level 1",
    "wake_2": "by a wake from level 2",
    "spare": "from a spare",
    "cold": "by a cold start",
    "sleep_1": "to sleep at level 1",
    "sleep_2": "to sleep at level 2",
}
FOLLOW_WORDS = {
    "waiting": "waits",
    "unreadable": "cannot be read, nothing is changed",
    "under_way": "is under way",
    "refused": "cannot be carried out, and is not acknowledged",
    "done": "is carried out",
}


def status_line(planner: Mapping[str, Any] | None) -> str | None:
    """The planner's one line in `dynamo status`; None where nobody has asked for a planner."""
    if planner is None:
        return None
    last, reported = planner.get("last_decision"), _state(planner)
    if planner["state"] == "stopped" and last is None:
        return None
    if planner.get("trouble"):
        return f"{reported}: {planner['trouble']}"
    if fixed := planner.get("fixed_fleet"):
        reported += f"; {fixed_fleet_line(fixed)}"
    return reported if last is None else f"{reported}; last: {decision_line(last)}"


def status_lines(planner: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None) -> Iterator[str]:
    """`dynamo planner status`. With the `defaults` of its options also those that have another value."""
    yield f"planner   {_state(planner)}"
    if planner.get("trouble"):
        yield f"note      {planner['trouble']}"
    if planner.get("adjusting"):
        yield "next      when the adjustment under way has ended, and an interval after it"
    elif planner.get("next_decision_s") is not None:
        yield f"next      in {max(0.0, planner['next_decision_s']):.1f} s"
    for component in planner.get("waiting_for_gpus", ()):
        yield f"waiting   {component} +1 for a GPU that is being freed"
    for role, source in (planner.get("models") or {}).items():
        yield f"model     {role}: {source}"
    if planner.get("profile"):
        yield f"profile   {_profile(planner['profile'])}"
    for row in planner.get("drift", ()):
        yield (
            f"drift     {row['component']} {row['kind']}: {row['p50']:+.0%} off the profile, p90 {row['p90']:+.0%} "
            f"(of {row['passes']} passes)"
        )
    if planner.get("fixed_fleet"):
        yield f"fixed     {fixed_fleet_line(planner['fixed_fleet'])}"
    if planner.get("last_decision"):
        yield f"last      {decision_line(planner['last_decision'])}"
    if virtual := planner.get("virtual"):
        yield f"virtual   {_virtual(virtual)}"
    if planner.get("tensorboard"):
        yield f"scalars   {planner['tensorboard']} (TensorBoard)"
    if planner.get("reports") and planner["state"] != "stopped":
        yield f"reports   {planner['reports']}"
    if planner.get("pulls"):
        failed = planner["failed_ticks"]
        yield f"counts    {planner['pulls']} pulls, {planner['decisions']} decisions, {failed} failed ticks"
    if held := planner.get("loop_held_max_ms"):
        longest = max(held, key=lambda what: float(held[what]["wall"]))
        wall_ms, cpu_ms = held[longest]["wall"], held[longest]["cpu"]
        yield f"loop      held for {wall_ms:.1f} ms at most ({longest}; CPU {cpu_ms:.1f} ms)"
    if planner.get("follow"):
        yield f"follow    {follow_line(planner['follow'])}"
    yield from lead_lines(planner.get("lead_times", ()))
    if defaults is not None:
        yield ""
        yield from _option_lines(planner["options"], defaults)


def fixed_fleet_line(fixed: Mapping[str, Any]) -> str:
    """`9.9 % fewer GPU-hours than the fixed fleet 5P2D (last 1.0 h; 99.1 % kept, the fixed fleet 99.2 %)`"""
    change = fixed["gpu_hours_ratio"] - 1
    decode = fixed["decode"]
    fleet = f"{fixed['prefill']}P{decode}D" if fixed["prefill"] else f"of {decode} worker{'' if decode == 1 else 's'}"
    return (
        f"{abs(change):.1%} {'fewer' if change < 0 else 'more'} GPU-hours than the fixed fleet {fleet} "
        f"(last {fixed['hours']:.1f} h; {fixed['share']:.1%} kept, the fixed fleet {fixed['fixed_share']:.1%})"
    ).replace("%", " %")


def _option_lines(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    reported = {name: value for name, value in options.items() if name == "policy" or value != defaults.get(name)}
    width = max(map(len, reported), default=0)
    for name, value in reported.items():
        shown = "-" if value is None else str(value).lower() if isinstance(value, bool) else value
        yield f"{name.replace('_', '-'):{width}}  {shown}"
    if others := len(options) - len(reported):
        yield f"({others} other options have their defaults: --json shows them)"


def lead_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """`lead      VllmWorker from a spare: 2.1 s, 9 in 10 within 2.6 s (last 2.0 s, of 12)`"""
    for row in rows:
        known, way = row["host"], RUNG_WORDS.get(row["rung"], row["rung"])
        times = f"{known['median_s']:.2f} s, 9 in 10 within {known['p90_s']:.2f} s"
        yield f"lead      {row['component']} {way}: {times} (last {known['last_s']:.2f} s, of {known['count']})"


def _state(planner: Mapping[str, Any]) -> str:
    acts = ", no operation: it decides and acts on nothing" if planner["no_operation"] else ""
    if planner["state"] != "running":
        return str(planner["state"])
    options = planner["options"]
    policy = options.get("policy", "load")
    every = options.get("adjustment_interval", options.get("throughput_adjustment_interval_seconds"))
    reported = f"{planner['state']}{acts}" if policy == "load" else f"{planner['state']} ({policy}){acts}"
    return reported if every is None else f"{reported}, every {every:g} s"


def _profile(profile: Mapping[str, Any]) -> str:
    """`profile (certified)`, `dynamo_H200_TP1P_TP1D (not measured on this host)`"""
    certificate = (
        profile["certificate"] or "not measured by `dynamo profile`: of other engines, and corrected by what is seen"
    )
    return f"{profile['name']} ({certificate})"


def _virtual(virtual: Mapping[str, Any]) -> str:
    """`v1/dynamo/planner/: decision 7 (prefill=1, decode=3), not acknowledged for 12 s`"""
    if virtual["decision_id"] < 0:
        return f"{virtual['keys']}: no decision yet"
    wanted = f"prefill={virtual['num_prefill_workers']}, decode={virtual['num_decode_workers']}"
    reported = f"{virtual['keys']}: decision {virtual['decision_id']} ({wanted})"
    if virtual["scaled_decision_id"] >= virtual["decision_id"]:
        return f"{reported}, acknowledged"
    given_up = "" if virtual["pending"] else ": given up"
    return f"{reported}, not acknowledged for {virtual['waits_s'] or 0:.0f} s{given_up}"


def follow_line(follow: Mapping[str, Any]) -> str:
    """The planner that the arbiter follows, in one line of `dynamo status`."""
    reported = f"{follow['environment']} ({follow['keys']}): "
    if follow["decision_id"] >= 0:
        wanted = f"prefill={follow['num_prefill_workers']}, decode={follow['num_decode_workers']}"
        reported += f"decision {follow['decision_id']} ({wanted}) "
    reason = f": {follow['reason']}" if follow.get("reason") else ""
    return f"{reported}{FOLLOW_WORDS.get(follow['phase'], follow['phase'])}{reason}"


def decision_line(record: Mapping[str, Any]) -> str:
    """`planner:17 at 14:03:21: PrefillWorker hold (floor), VllmWorker +1 (scale_up: committed)`"""
    at = datetime.fromtimestamp(record["wall_s"]).astimezone()
    parts = [_step(reason, record["outcomes"]) for reason in record["decision"]["reasons"]]
    return f"{record['stimulus_id']} at {at:%H:%M:%S}: {', '.join(parts)}"


def history_row(record: Mapping[str, Any]) -> str:
    """One decision of `dynamo planner history`, with the numbers that it was made from."""
    inputs = record["inputs"]
    numbers = (("queue", "prefill_queue_size"), ("kv", "average_kv_load"))
    seen = [f"{what} {inputs[key]:.2f}" for what, key in numbers if inputs.get(key) is not None]
    for what, window in (("requests", inputs.get("traffic")), ("expected", inputs.get("prediction"))):
        if window and isinstance(window.get("num_req"), int | float):
            seen.append(f"{what} {window['num_req']:.1f}")
    line = decision_line(record)
    return f"{line}  [{', '.join(seen) or 'no sample'}]"


def _step(reason: Mapping[str, Any], outcomes: Mapping[str, Any]) -> str:
    step = f"{reason['step']:+d}" if reason["step"] else "hold"
    outcome = outcomes.get(reason["component"])
    became = ""
    if outcome is not None:
        why = f": {outcome['reason']}" if outcome.get("reason") else ""
        became = f"; {str(outcome['outcome']).replace('_', ' ')}{why}"
    return f"{reason['component']} {step} ({str(reason['rule']).replace('_', ' ')}{became})"
