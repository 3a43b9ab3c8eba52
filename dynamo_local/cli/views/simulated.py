"""The runs of `dynamo simulate` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_local.twin.metrics import Metrics


def print_tables(
    facts: Sequence[tuple[str, str]], rows: Sequence[tuple[str, Metrics]], words: Mapping[str, Any]
) -> None:
    """What the runs were worth, what was dropped and why, by what workers came, and the times."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # A fixed width, so that the same command always prints the same bytes.
    console = Console(width=120, highlight=False)
    console.print("; ".join(f"{what}: {value}" for what, value in facts), markup=False)
    worth = Table("run", box=box.SIMPLE)
    for label in ("requests", "completed", "dropped", "attainment", "goodput/s", "GPU-hours", "GPUs", "scale actions"):
        worth.add_column(label, justify="right")
    times = Table("run", box=box.SIMPLE)
    for label in ("mean", "p50", "p95", "p99"):
        times.add_column(f"TTFT {label}", justify="right")
    for label in ("mean", "p50", "p95", "p99"):
        times.add_column(f"ITL {label}", justify="right")
    for name, m in rows:
        counts = (m.requests, m.completed, m.dropped)
        worth.add_row(
            name,
            *(f"{count:,}" for count in counts),
            f"{m.attainment:.2%}",
            f"{m.goodput_rps:.2f}",
            f"{m.gpu_hours:.3f}",
            f"{m.gpus_mean:.2f}",
            str(m.scale_actions),
        )
        values = [getattr(spread, part) for spread in (m.ttft_ms, m.itl_ms) for part in ("mean", "p50", "p95", "p99")]
        times.add_row(name, *("–" if value is None else f"{value:.1f}" for value in values))
    console.print(worth)
    for name, m in rows:
        for reason, count in m.dropped_by.items():
            console.print(f"{name}: {count:,} dropped: {_explained(reason, words)}", markup=False)
        if {"flips", "wakes", "sleeps"} & m.done_by.keys():
            console.print(
                f"{name}: {', '.join(f'{count:,} {what}' for what, count in m.done_by.items())}", markup=False
            )
    console.print("milliseconds:")
    console.print(times)


def _explained(reason: str, words: Mapping[str, Any]) -> str:
    """Why requests were dropped, and what changes it."""
    from dynamo_local.twin.process import Dropped

    explanations = {
        Dropped.FRONTEND_FULL: f"the Frontend had {words['max_inflight']} requests already (429): more workers, or a "
        "higher --max-inflight, with which they wait until their deadline",
        Dropped.WORKERS_FULL: f"{words['max_num_waiting']} requests waited for each worker already (429): more "
        "workers, or a higher --max-num-waiting, with which they wait until their deadline",
        Dropped.DEADLINE: f"not done within {words['request_timeout_s']:g} s (504): more workers, or a longer "
        "--request-timeout-s",
        Dropped.TOO_LONG: "prompt and answer are longer than the model's context (400)",
    }
    return explanations.get(Dropped(reason), reason)
