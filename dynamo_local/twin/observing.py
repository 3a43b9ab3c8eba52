"""What the twin's planner is shown beyond loads and workers, as far as it wants it."""

from __future__ import annotations

from dataclasses import replace

from dynamo_local.core.types import Role
from dynamo_local.planner.values.pull import Pull, Wants
from dynamo_local.twin.flow import DECODES, Flow
from dynamo_local.twin.options import DECODE, PREFILL
from dynamo_local.twin.passes_seen import capabilities


def observed(flow: Flow, wants: Wants, pull: Pull) -> Pull:
    """The pull, with traffic and passes."""
    now_s = pull.at_s
    if wants.traffic_window_s is not None:
        flow.serving(now_s, *DECODES)  # answers end within passes: bring them to now
        window_s = wants.traffic_window_s
        requests = flow.seen.requests(now_s, window_s) if wants.requests else None
        pull = replace(pull, traffic=flow.seen.window(now_s, window_s), requests=requests)
    if wants.passes and flow.passes_seen is not None:
        serving = flow.serving(now_s, Role.PREFILL, *DECODES)
        one_each = {PREFILL if each.role is Role.PREFILL else DECODE: each for each in serving}
        limits = {component: capabilities(each, flow.max_model_len) for component, each in one_each.items()}
        pull = replace(pull, engines=flow.passes_seen.engines(serving, now_s), capabilities=limits)
    return pull
