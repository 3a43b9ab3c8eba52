"""Prefill here, or in a prefill worker? The conditional decision, with its reason for the log. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.types import Missing


@dataclass(frozen=True, slots=True)
class DisaggSettings:
    """The two thresholds, changeable at run time. Both comparisons are strict.

    `max_local_prefill_length`: tokens to compute up to which a prefill stays local.
    `max_prefill_queue_size`: entries waiting at which nothing more goes remote.
    The defaults are those of Dynamo's disaggregated router example.
    """

    max_local_prefill_length: int = 1000
    max_prefill_queue_size: int = 2

    def __post_init__(self) -> None:
        for name in ("max_local_prefill_length", "max_prefill_queue_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
            if value < 0:
                raise ValueError(f"{name} must be 0 or more, not {value}")


DEPTH_MAX_AGE_S = 0.05
"""How old the queue's depth may be when it decides about a request."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """The prefill queue as one decode worker knows it: entries that wait (`late` of them behind all others), and all
    that are unfinished, those being computed included."""

    pending: int
    outstanding: int
    late: int = 0


class SampledDepth:
    """The prefill queue's depth as one decode worker knows it: the last sample, and what it enqueued since.

    Without this, a burst within one sample would find the queue empty as a whole. The sample does not show what
    others took out since, which errs towards local prefill.
    """

    def __init__(self) -> None:
        self._value: QueueView | Missing = Missing("not sampled yet")
        self._fresh_until_s = float("-inf")
        self._enqueued = 0

    def due(self, now_s: float) -> bool:
        """Whether a new sample is needed."""
        return now_s >= self._fresh_until_s

    def asked(self) -> None:
        """A sample is being taken: what is enqueued from now on may not be in it."""
        self._enqueued = 0

    def sampled(self, value: QueueView | Missing, now_s: float) -> None:
        """The sample came: so long was the queue, or why that is not known."""
        self._value = value
        self._fresh_until_s = now_s + DEPTH_MAX_AGE_S

    def enqueued(self) -> None:
        """One entry more, until the next sample."""
        self._enqueued += 1

    @property
    def pending(self) -> int | Missing:
        """Entries waiting, as far as is known."""
        return self._value if isinstance(self._value, Missing) else self._value.pending + self._enqueued

    @property
    def view(self) -> QueueView | Missing:
        """The same, with what is unfinished."""
        seen, more = self._value, self._enqueued
        if isinstance(seen, Missing):
            return seen
        return QueueView(seen.pending + more, seen.outstanding + more, seen.late)


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """`reason` is one line for the log; `prefill_length` counts the tokens that are not cached."""

    remote: bool
    prefill_length: int
    reason: str


def decide_prefill(
    *,
    prompt_length: int,
    prefix_hit_rate: float,
    queue_size: int | Missing,
    prefill_workers: int,
    settings: DisaggSettings,
    conditional: bool = True,
) -> PrefillDecision:
    """Remote iff `int(prompt_length × (1 − prefix_hit_rate)) > max_local_prefill_length and
    queue_size < max_prefill_queue_size` (rule and log line: Dynamo's `disagg_router.py`).

    `conditional=False` sends every prefill away. Nothing goes remote without a registered prefill
    worker (it would only wait for its deadline), nor on a queue of unknown size: that is not an empty one.
    """
    prefill_length = int(prompt_length * (1 - prefix_hit_rate))
    why = ""
    if prefill_workers < 1:
        remote, why = False, "no prefill worker is registered"
    elif not conditional:
        remote, why = True, "conditional-disagg is off"
    elif isinstance(queue_size, Missing):
        remote, why = False, f"prefill queue size unknown: {queue_size.reason}"
    else:
        long_enough = prefill_length > settings.max_local_prefill_length
        remote = long_enough and queue_size < settings.max_prefill_queue_size
    shown = "unknown" if isinstance(queue_size, Missing) else str(queue_size)
    reason = (
        f"Remote prefill: {remote} (prefill length: {prefill_length}/{prompt_length}, "
        f"prefill queue size: {shown}/{settings.max_prefill_queue_size})"
    )
    return PrefillDecision(remote, prefill_length, f"{reason}: {why}" if why else reason)


# --- handover
# The two steps of a disaggregated request between HTTP servers (vLLM's `kv_transfer_params`). Pure: values to values.
#
# 1. A prefill server gets the request with room for one token, unstreamed, and `do_remote_decode`. Its answer names
#    where the prompt's KV is kept.
# 2. A decode server gets the client's request with that answer's `kv_transfer_params`, pulls the KV and streams.
#
# Source: vLLM's `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`.

PARAMS = "kv_transfer_params"

ASK_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Tells a prefill engine that another engine decodes. vLLM's NixlConnector wants all of these members."""

_ONE_TOKEN = ("max_completion_tokens", "min_tokens")
"""Where the client gives these, a prefill of one token must not contradict them."""

_NOT_FOR_PREFILL = ("stream_options",)


def why_not(request: Mapping[str, Any]) -> str | None:
    """Why this request cannot be handed over and is prefilled where it is decoded; None where it can."""
    if request.get(PARAMS) is not None:
        return f"it brings {PARAMS} of its own"
    for name in ("n", "best_of"):
        if request.get(name) not in (None, 1):
            return f"it asks for {name}={request[name]!r}: a hand-over is for one answer"
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        return "it has several prompts: a hand-over is for one"
    return None


def prefill_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Step 1: what the prefill server is sent."""
    asked = {name: value for name, value in request.items() if name not in _NOT_FOR_PREFILL}
    asked |= {name: 1 for name in _ONE_TOKEN if asked.get(name)}
    return {**asked, "stream": False, "max_tokens": 1, PARAMS: dict(ASK_PREFILL)}


def params_of(answer: Any) -> Mapping[str, Any] | None:
    """The KV's identity in the prefill server's answer; None where it kept none."""
    found = answer.get(PARAMS) if isinstance(answer, dict) else None
    return found if isinstance(found, dict) and found else None


def decode_request(request: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Step 2: what the decode server is sent."""
    return {**request, PARAMS: dict(params)}


_WAKES = "~"
"""Between an engine id and the number of its wakes."""


def first_id(engine_id: str) -> str:
    """The id that a KV engine had at its start: what it is registered under."""
    return engine_id.partition(_WAKES)[0]


def wake_id(engine_id: str) -> str:
    """The id of a KV engine after its next wake. Its peers must connect again: its memory is elsewhere now."""
    first, _, wakes = engine_id.partition(_WAKES)
    return f"{first}{_WAKES}{int(wakes or 0) + 1}"
