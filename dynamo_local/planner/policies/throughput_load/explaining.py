"""A role's reason in words, with its numbers; and the words for numbers, which `explain` uses, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Numbers = Mapping[str, float]

NAMES = {
    "estimated_ttft_ms_min": "TTFT on the best engine",
    "estimated_ttft_ms_max": "TTFT on the worst engine",
    "waiting_ms_max": "the wait behind the queue",
    "waiting_ms_consolidated": "the wait behind the queue, with one engine less,",
    "prefill_busy_max": "the busiest engine's share of time",
    "prefill_busy_consolidated": "the busiest engine's share of time, with one less,",
    "estimated_itl_ms_min": "ITL on the best engine",
    "estimated_itl_ms_max": "ITL on the worst engine",
    "estimated_itl_ms_consolidated": "ITL with one engine less",
    "decode_kv_tokens_max": "KV tokens on the fullest engine",
    "decode_kv_tokens_consolidated": "KV tokens per engine, with one less,",
    "prefill_queue_any": "the longest queue",
    "prefill_queue_max": "the longest queue of the interval",
    "prefill_queue_consolidated": "the longest queue, with one engine less,",
    "decode_kv_any": "KV on the fullest engine",
    "decode_kv_max": "the most KV of the interval",
    "decode_kv_consolidated": "KV per engine, with one less,",
    "engines_hung": "engines that run no pass though requests wait",
    "predicted_num_req": "predicted requests",
    "throughput_lower_bound": "the throughput loop's lower bound",
}

_UP = ("estimated_ttft_ms_min", "estimated_itl_ms_min", "prefill_queue_any", "decode_kv_any")
"""Those that ask for more when they are above their limits."""


def why(rule: str, numbers: Numbers) -> str:
    """`TTFT on the best engine 720 > 500`."""
    return _WORDS.get(rule, _loads)(numbers)


def _loads(numbers: Numbers) -> str:
    """What was compared: those that ask for more, then, where one could go, what would be without it."""
    ups = [name for name in _UP if name in numbers]
    downs = _downs(numbers) if numbers["workers"] > max(1, numbers["workers_min"]) else []
    if ups or downs:
        return "; ".join(_compared(numbers, name) for name in (*ups, *downs))
    return _sized(numbers) if "predicted_replicas" in numbers else "nothing was due"


def _up(numbers: Numbers) -> str:
    over = [name for name in _UP if name in numbers and numbers[name] >= numbers[f"{name}_limit"]]
    return " and ".join(_compared(numbers, name) for name in over)


def _downs(numbers: Numbers) -> list[str]:
    """What would be, with one engine less, where that was looked at; and what keeps all from going."""
    compared = [name for name in numbers if f"{name}_limit" in numbers and name not in _UP]
    after = [name for name in compared if name.endswith("_consolidated") or name == "engines_hung"]
    return after or compared


def _down(numbers: Numbers) -> str:
    return " and ".join(_compared(numbers, name) for name in _downs(numbers))


def _refused(numbers: Numbers) -> str:
    after = [name for name in numbers if name.endswith("_consolidated")]
    return " and ".join(_compared(numbers, name) for name in after if numbers[name] >= numbers[f"{name}_limit"])


def _compared(numbers: Numbers, name: str) -> str:
    value, limit = numbers[name], numbers[f"{name}_limit"]
    sign = ">" if value > limit else "<" if value < limit else "="
    return f"{NAMES.get(name, name)} {value:.4g} {sign} {limit:g}"


def _sized(numbers: Numbers) -> str:
    words = f"the throughput loop's bound is {numbers['throughput_lower_bound']:g}"
    if "predicted_replicas" in numbers:
        rps, engine = numbers["predicted_requests_per_second"], numbers["engine_capacity_requests_per_second"]
        needed = numbers["predicted_replicas"]
        words = f"{rps:.4g} requests/s are expected, a worker takes {engine:.4g}: {needed:g} needed; {words}"
    if numbers.get("sla_unreachable"):
        words += " (no batch keeps the target: sized for the fastest)"
    return words


def _gpus(numbers: Numbers) -> str:
    names = [name for name in ("max_gpu_budget", "min_gpu_budget") if name in numbers]
    budgets = [f"{name.replace('_', '-')} {numbers[name]:g}" for name in names]
    return ", ".join((f"{numbers['gpus_counted']:g} GPUs counted", *budgets))


def _workers(numbers: Numbers) -> str:
    return f"{numbers['workers_ready']:g} ready of {numbers['workers']:g}"


def _said(text: str) -> Callable[[Numbers], str]:
    return lambda numbers: text


_WORDS: dict[str, Callable[[Numbers], str]] = {
    "no_fpm_data": _said("its engines publish no forward-pass metrics"),
    "scaling_in_progress": lambda numbers: f"workers start or leave ({_workers(numbers)})",
    "worker_count_mismatch": lambda numbers: (
        f"metrics of {numbers['fpm_engines']:g} engines, where {numbers['fpm_engines_expected']:g} are ready"
    ),
    "insufficient_data": lambda numbers: (
        f"{numbers['samples']:g} samples of at least {numbers['samples_min']:g} that tell how its load acts, "
        "or its engines do not tell their limits"
        if "samples" in numbers
        else "how much waits in the prefill queue is not known"
    ),
    "partner_not_ready": _said("the other role cannot be judged"),
    "unset": _said("nothing was due"),
    "no_traffic_data": _said("how many requests came is not known"),
    "predict_failed": _said("the predictor failed"),
    "model_not_ready": _said("what a worker can take is not known yet, or what requests look like"),
    "scale_up": _up,
    "scale_down": _down,
    "scale_down_capped_by_throughput": lambda numbers: (
        f"{_down(numbers)}, but the throughput loop's bound is {numbers['throughput_lower_bound']:g}"
    ),
    "scale_down_refused_consolidation": _refused,
    "set_lower_bound": _sized,
    "scale": _sized,
    "gpu_budget_guard_hold": lambda numbers: f"{numbers['workers_wanted']:g} wanted, {_gpus(numbers)}",
    "gpu_budget_reconcile": lambda numbers: f"floor {numbers['workers_min']:g}, {_gpus(numbers)}",
    "override_by_user_plugin": lambda numbers: f"a plugin wants {numbers['workers_wanted']:g}",
}
