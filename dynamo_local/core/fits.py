"""Whether a model fits on GPUs, and how many engines of it do: the sum that `dynamo serve --model` prints. Pure.

Bytes of GPU memory are decimal: 1 GB is 10^9 bytes. The sum of one rank of an engine:
its share of the weights + working memory + KV of at least one whole request <= memory × utilisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo_local.core.model_facts import ModelFacts

UTILISATION = 0.9
"""vLLM's default of `gpu-memory-utilization` for this plan: the rest is left to the driver and to fragments."""
CONTEXT_BYTES = 1_500_000_000
"""CUDA context, graphs and communication buffers of one rank."""
LARGE_GPU_BYTES = 70 * 1024**3
BATCHED_LARGE, BATCHED_SMALL = 8192, 2048
"""vLLM's defaults of `max-num-batched-tokens` on GPUs from that size on, and below."""
SEQUENCES = 256
"""Requests of one pass whose logits are held."""
LEAST_TOKENS = 2048
"""Without --max-model-len a plan never offers less, unless the model has less."""
ROUND_TOKENS = 256
TP_MAX = 64


class DoesNotFit(ValueError):
    """The model does not fit. The text is the sum, and what would fit."""


def gb(size_bytes: float) -> str:
    """`140.0 GB`; below 1 GB `16.8 MB`."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 0.95e9 else f"{size_bytes / 1e6:.3g} MB"


@dataclass(frozen=True, slots=True)
class Gpus:
    """`count` devices that are free, each with at least `memory_bytes` in total."""

    count: int
    memory_bytes: int
    name: str = "GPU"

    @property
    def batched(self) -> int:
        """Tokens of one pass by default."""
        return BATCHED_LARGE if self.memory_bytes >= LARGE_GPU_BYTES else BATCHED_SMALL


@dataclass(frozen=True, slots=True)
class Needs:
    """One model and what the user fixed of it. None: the plan decides. `batched`: tokens of one pass."""

    facts: ModelFacts
    weights_bytes: int
    max_len: int | None = None
    tp: int | None = None
    batched: int | None = None
    utilisation: float = UTILISATION


@dataclass(frozen=True, slots=True)
class Fit:
    """One engine: `tp` GPUs, requests of up to `max_len` tokens. Bytes are of one rank.

    `whole`: `max_len` is all that the model, or the user, wants. `shorter`: a length that fits fewer GPUs, and how
    many; None where there is none.
    """

    needs: Needs
    gpus: Gpus
    tp: int
    max_len: int
    whole: bool
    shorter: tuple[int, int] | None = None

    @property
    def batched(self) -> int:
        return self.needs.batched or self.gpus.batched

    @property
    def weights_bytes(self) -> int:
        return -(-self.needs.weights_bytes // self.tp)

    @property
    def working_bytes(self) -> int:
        return working_bytes(self.needs.facts, self.tp, self.batched)

    @property
    def kv_room_bytes(self) -> int:
        """The rest, for KV."""
        return int(self.gpus.memory_bytes * self.needs.utilisation) - self.weights_bytes - self.working_bytes

    @property
    def request_bytes(self) -> int:
        """KV of one request of `max_len` tokens."""
        return self.needs.facts.sequence_bytes(self.max_len, self.tp, batched=self.batched)

    @property
    def requests(self) -> int:
        """So many whole requests have room at once."""
        return self.kv_room_bytes // max(1, self.request_bytes)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens for which there is room, states and windows aside; None where KV does not grow with tokens."""
        per_token = self.needs.facts.token_bytes(self.tp)
        return self.kv_room_bytes // per_token if per_token else None


def working_bytes(facts: ModelFacts, tp: int, batched: int) -> int:
    """An estimate of what one rank needs beside weights and KV: context, activations of a pass, logits."""
    activations = batched * (8 * facts.hidden + 4 * facts.intermediate // tp) * facts.value_bytes
    logits = 2 * SEQUENCES * facts.vocabulary * 4
    return CONTEXT_BYTES + activations + logits


def fit(needs: Needs, gpus: Gpus, *, least: bool = False) -> Fit:
    """The engine with the fewest GPUs that holds the wanted length, else the longest length that fits.

    `least`: the fewest GPUs come before the model's whole length. Raises `DoesNotFit` with the sum.
    """
    wanted = needs.max_len or needs.facts.max_len
    sizes = _sizes(needs, gpus)
    lengths = {tp: longest(needs, gpus, tp) for tp in sizes}
    enough = wanted if needs.max_len is not None else min(wanted, LEAST_TOKENS)
    holding = [tp for tp in sizes if lengths[tp] >= (enough if least else wanted)]
    if holding:
        tp = holding[0]
        length = min(wanted, lengths[tp])
        fewer = [(lengths[each], each) for each in sizes if each < tp and lengths[each] >= LEAST_TOKENS]
        return Fit(needs, gpus, tp, length, length == wanted, fewer[-1] if fewer else None)
    tp = max(sizes, key=lambda each: lengths[each])
    if lengths[tp] < enough or needs.max_len is not None:
        raise DoesNotFit(_why(needs, gpus, max(sizes), wanted, lengths[tp]))
    return Fit(needs, gpus, tp, lengths[tp], False)


def longest(needs: Needs, gpus: Gpus, tp: int) -> int:
    """Tokens of the longest request that an engine of so many GPUs holds; 0: not even its weights."""
    probe = Fit(needs, gpus, tp, 0, False)
    wanted = needs.max_len or needs.facts.max_len

    def holds(tokens: int) -> bool:
        return needs.facts.sequence_bytes(tokens, tp, batched=probe.batched) <= probe.kv_room_bytes

    if not holds(1):
        return 0
    if holds(wanted):
        return wanted
    low, high = 1, wanted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low // ROUND_TOKENS * ROUND_TOKENS


def _sizes(needs: Needs, gpus: Gpus) -> list[int]:
    """Tensor-parallel sizes that the model's heads allow, ascending."""
    if needs.tp is not None:
        if needs.tp > gpus.count:
            raise DoesNotFit(f"tensor-parallel-size is {needs.tp}, but {_free(gpus)}")
        if not needs.facts.divides(needs.tp):
            raise DoesNotFit(
                f"tensor-parallel-size is {needs.tp}, which does not divide the {needs.facts.heads} attention heads; "
                f"possible here: {', '.join(map(str, _dividing(needs.facts, gpus.count)))}"
            )
        return [needs.tp]
    found = _dividing(needs.facts, gpus.count)
    if not found:
        raise DoesNotFit(f"an engine needs a GPU, but {_free(gpus)}")
    return found


def _dividing(facts: ModelFacts, most: int) -> list[int]:
    return [tp for tp in range(1, min(most, TP_MAX) + 1) if facts.divides(tp)]


def _free(gpus: Gpus) -> str:
    return f"{gpus.count} GPU{'s' * (gpus.count != 1)} {'are' if gpus.count != 1 else 'is'} free"


def _why(needs: Needs, gpus: Gpus, tp: int, wanted: int, possible: int) -> str:
    """`weights 140.0 GB + … > 4 × 79.1 GB × 0.9`, and what to do."""
    tried = Fit(needs, gpus, tp, wanted, False)
    total = f"{tp} × {gb(gpus.memory_bytes)} × {needs.utilisation:g} = {gb(tp * gpus.memory_bytes * needs.utilisation)}"
    sum_ = (
        f"weights {gb(needs.weights_bytes)} + working memory {gb(tp * tried.working_bytes)} + "
        f"KV {gb(tp * tried.request_bytes)} for one request of {wanted:,} tokens > {total}"
    )
    if possible >= ROUND_TOKENS:
        return f"{sum_}; {possible:,} tokens fit: --max-model-len {possible}"
    return f"{sum_}; take more or larger GPUs, or a quantised copy of the model"


def share(count: int, sizes: Sequence[int]) -> list[int]:
    """How many engines each model gets of so many GPUs: one each, then one more for the model with the fewest.

    `sizes`: GPUs of one engine of each model. Raises `DoesNotFit`.
    """
    left = count - sum(sizes)
    if left < 0:
        needed = " + ".join(map(str, sizes))
        raise DoesNotFit(f"the models need {needed} = {sum(sizes)} GPUs, but {count} are free")
    engines = [1] * len(sizes)
    while True:
        able = [at for at, size in enumerate(sizes) if size <= left]
        if not able:
            return engines
        poorest = min(able, key=lambda at: engines[at])
        engines[poorest] += 1
        left -= sizes[poorest]


def first_that_fit(count: int, sizes: Sequence[int]) -> list[int]:
    """One engine for each of the first models, in order, as long as there are GPUs; 0 for those that must wait."""
    engines = []
    for size in sizes:
        engines.append(int(size <= count))
        count -= size * engines[-1]
    return engines


def sum_line(found: Fit) -> str:
    """The sum of one engine, in one line."""
    tp = found.tp
    each = "" if tp == 1 else " per GPU"
    room = f"{gb(found.gpus.memory_bytes)} × {found.needs.utilisation:g}"
    return (
        f"{room} - weights {gb(found.weights_bytes)} - working memory {gb(found.working_bytes)} = "
        f"{gb(found.kv_room_bytes)} for KV{each}"
    )


def kv_line(found: Fit) -> str:
    """KV per token and per request, in one line."""
    facts, tp = found.needs.facts, found.tp
    parts = [f"{facts.token_bytes(tp):,} bytes per token"]
    if windows := facts.token_bytes(tp, windows=True):
        parts.append(f"{windows:,} per token within windows")
    if state := facts.state_bytes(tp):
        parts.append(f"{gb(state)} of state per request")
    each = "" if tp == 1 else " (per GPU)"
    estimated = "" if facts.exact else ", estimated from above: its attention is not known here"
    return (
        f"KV: {' + '.join(parts)}{each}; one request of {found.max_len:,} tokens takes {gb(found.request_bytes)}, "
        f"{found.requests:,} fit at once{estimated}"
    )


# --- prefill and decode apart ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Division:
    """Engines of each role. `prefill` is 0 in an aggregated graph. `why` is one sentence."""

    prefill: int
    decode: int
    why: str


def divide(engines: int, chunk_ms: float | None, itl_ms: float | None, obstacles: Iterable[str] = ()) -> Division:
    """Prefill and decode apart where one prefill pass takes longer than the gap that tokens may have.

    `chunk_ms`: such a pass by the profile; None: no profile. `obstacles`: why the engine cannot.
    """
    if itl_ms is None:
        return Division(0, engines, "aggregated: there is no --itl that prefill passes could break")
    if chunk_ms is None:
        return Division(0, engines, "aggregated: no profile says how long a prefill pass takes")
    passes = f"a prefill pass takes {chunk_ms:.0f} ms, --itl is {itl_ms:g} ms"
    if chunk_ms <= itl_ms:
        return Division(0, engines, f"aggregated: {passes}")
    obstacle = next(iter(obstacles), None)
    if obstacle is not None:
        return Division(0, engines, f"aggregated although {passes}: {obstacle}")
    if engines < 2:
        return Division(0, engines, f"aggregated although {passes}: there is room for one engine only")
    prefill = max(1, engines // 2)
    return Division(prefill, engines - prefill, f"prefill and decode apart: {passes}")
