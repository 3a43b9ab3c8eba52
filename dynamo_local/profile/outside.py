"""Limits of an engine that is measured over HTTP, and the gap between its tokens. Pure.

A server that was started by a command reports no passes. Its metrics, its list of models and its command line name its
limits. The user gives the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from dynamo_local.profile.points import Limits

KV_TOKENS = ("sglang:max_total_num_tokens",)
MAX_NUM_SEQS = ("--max-num-seqs", "--max-running-requests")
MAX_BATCHED = ("--max-num-batched-tokens", "--chunked-prefill-size")
BATCHED = 8192
"""Tokens of a pass where nobody says."""


class Scrape(Protocol):
    """`components.commands.metrics_text.Metrics`, as far as it is asked here."""

    def sum(self, name: str, **labels: str) -> float | None:
        """Over all samples of that name; None where there is none."""
        ...

    def label(self, label: str) -> str | None:
        """The value that samples give to this label, where they agree; None else."""
        ...


@dataclass(frozen=True, slots=True)
class Given:
    """Limits of a server as the command line of `dynamo profile` has them; None: what the server says."""

    kv_tokens: int | None = None
    context_length: int | None = None
    max_num_seqs: int | None = None


NOTHING = Given()


@dataclass(frozen=True, slots=True)
class Unknown:
    """The unknown limits, each with the option that gives it."""

    options: tuple[str, ...]

    def __str__(self) -> str:
        names = {"--kv-tokens": "how many tokens its KV cache holds", "--context-length": "its longest sequence"}
        what = " and ".join(names.get(option, "how many requests it runs at once") for option in self.options)
        return f"does not say {what}; give {' and '.join(f'{option} N' for option in self.options)}"


def kv_tokens_of(scrape: Scrape) -> int | None:
    """Tokens that the KV cache holds, by the metrics of vLLM or SGLang; None where they do not say."""
    total = next((found for name in KV_TOKENS if (found := scrape.sum(name))), None)
    if total is not None:
        return int(total)
    engines = scrape.sum("vllm:cache_config_info")
    blocks, size = (scrape.label(name) or "" for name in ("num_gpu_blocks", "block_size"))
    return round(engines) * int(blocks) * int(size) if engines and blocks.isdigit() and size.isdigit() else None


def number_of(words: Sequence[str], options: Sequence[str]) -> int | None:
    """The number behind one of these options in a command's words (`--x 5` or `--x=5`); None where there is none."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            found = value if equals else (words[at + 1] if at + 1 < len(words) else "")
            if found.isdigit() and int(found):
                return int(found)
    return None


def limits_of(reported: Mapping[str, int | None], words: Sequence[str], given: Given) -> Limits | Unknown:
    """Limits of one server: first those `given`, then those it `reported`, then its command line."""
    found = {
        "kv_tokens": given.kv_tokens or reported.get("max_kv_tokens"),
        "context_length": given.context_length or reported.get("context_length"),
        "max_num_seqs": given.max_num_seqs or reported.get("max_num_seqs") or number_of(words, MAX_NUM_SEQS),
    }
    kv, context, seqs = found.values()
    if not kv or not context or not seqs:
        return Unknown(tuple(f"--{f.name.replace('_', '-')}" for f in fields(Given) if not found[f.name]))
    batched = reported.get("max_num_batched_tokens") or number_of(words, MAX_BATCHED) or BATCHED
    return Limits(kv, context, seqs, batched)


@dataclass(frozen=True, slots=True)
class Gap:
    """Between tokens while all streams decoded, with the tokens that each had on average, its prompt not counted."""

    itl_s: float
    tokens: float


def gap_of(streams: Sequence[Sequence[float]], answer: int) -> Gap | None:
    """From the times of the frames of each stream, of `answer` tokens each. None where they never all decoded at once.

    A frame may hold several tokens; the last of a stream's tokens ends with its last frame.
    """
    if not streams or any(len(times) < 2 for times in streams) or answer < 2:
        return None
    began_s, ended_s = max(times[0] for times in streams), min(times[-1] for times in streams)
    gaps, had = [], []
    for times in streams:
        inside = [at for at, time_s in enumerate(times) if began_s <= time_s <= ended_s]
        if len(inside) < 2:
            return None
        first, last = inside[0], inside[-1]
        per_frame = (answer - 1) / (len(times) - 1)
        gaps.append((times[last] - times[first]) / ((last - first) * per_frame))
        had.append(1 + (first + last) / 2 * per_frame)
    return Gap(sum(gaps) / len(gaps), sum(had) / len(had))
