"""The policies that are judged: ours, and three of others.

* ours: `simulator.mix.Shared`, each second and when a request is held.
* static: the best split that is fixed for the whole run, chosen afterwards from the arrivals that are judged. Its GPUs
  are whole, or halves with half the speed and as many slots as keep the time between tokens then.
* swap: llama-swap's rule. A model has at most one worker. It comes on demand, and the least recently used one goes.
* mux: each model always has a part of a GPU, as in MuxServe. Slots are divided among the models on a GPU, and its
  speed among those that have requests now. The parts follow the mean rates of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo_local.simulator.mix import Fixed, Mix, Placed, Request, World, within

HALF = 0.5
MUX_PARTS = 2
"""Models on a GPU, at least."""


# --- llama-swap's rule ---------------------------------------------------------------------------


class Swap:
    """Swap on demand, least recently used, one worker for each model."""

    ticks = True
    divided = False

    def first(self, mix: Mix) -> Sequence[Placed]:
        return ()

    def targets(self, world: World, now_s: float) -> Sequence[int]:
        engines = world.mix.engines
        have = [min(1, len(each)) for each in world.workers]
        asked = [m for m in range(len(engines)) if world.queues[m] and not have[m]]
        left = world.mix.gpus - sum(engine.gpus for engine, there in zip(engines, have, strict=True) if there)
        for model in sorted(asked, key=lambda m: -world.held_s(m, now_s)):
            # A worker that has not served yet is not taken: it was asked for.
            able = [m for m in range(len(engines)) if have[m] and world.workers[m] and world.workers[m][0].ready]
            for victim in sorted(able, key=lambda m: world.used_s[m] if not world.here[m] else now_s):
                if left >= engines[model].gpus:
                    break
                have[victim] = 0
                left += engines[victim].gpus
            if left < engines[model].gpus:
                break
            have[model] = 1
            left -= engines[model].gpus
        return have


# --- fixed workers -------------------------------------------------------------------------------


def kept_by_halves(
    mix: Mix, requests: Sequence[Request], model: int, halves_max: int, whole: bool
) -> Mapping[int, int]:
    """For each number of half GPUs that helps: how many of the model's requests are within the targets on them."""
    engine = mix.engines[model]
    mine = [each for each in requests if each.model == model]
    judged = sum(each.at_s >= mix.warm_up_s for each in mine)
    found, best = {0: 0}, 0
    for halves in range(1, halves_max + 1):
        odd, gpus = halves % 2, halves // 2
        if best == judged or (odd and (whole or engine.gpus > 1 or not engine.within(HALF))) or gpus % engine.gpus:
            continue
        placed: list[Placed] = [(model, (0,), engine.slots, 1.0)] * (gpus // engine.gpus)
        if odd:
            placed.append((model, (0,), engine.within(HALF), HALF))
        kept = within(mix, mine, World(mix, mine, Fixed(placed)).run())[model][1]
        if kept > best:
            found[halves] = best = kept
    return found


# --- always-on sharing by time -------------------------------------------------------------------


def mux(mix: Mix, requests: Sequence[Request]) -> Sequence[Fixed]:
    """Parts in proportion to the mean work; each model has at least one worker. Two ways to divide slots: equal parts,
    and as many as keep the time between tokens when all models on the GPU are busy."""
    work = [0.0] * len(mix.engines)
    for each in requests:
        engine = mix.engines[each.model]
        work[each.model] += engine.busy_s(each.isl, each.osl) / engine.slots * engine.gpus
    total = max(1e-9, sum(work))
    counts = [1] * len(mix.engines)
    places = max(MUX_PARTS * mix.gpus, sum(engine.gpus for engine in mix.engines))
    while True:
        used = sum(count * engine.gpus for count, engine in zip(counts, mix.engines, strict=True))
        lack = [
            (work[m] / total * places / (counts[m] * engine.gpus), m)
            for m, engine in enumerate(mix.engines)
            if used + engine.gpus <= places and (counts[m] + 1) * engine.gpus <= mix.gpus
        ]
        if not lack:
            break
        counts[max(lack)[1]] += 1
    placed = _muxed(mix, counts, work)
    return [Fixed(_parts(mix, placed, careful), divided=True) for careful in (False, True)]


def _muxed(mix: Mix, counts: Sequence[int], work: Sequence[float]) -> list[tuple[int, tuple[int, ...]]]:
    """Models and their GPUs. The busiest parts are placed first, each where the fewest models and least work are."""
    on_gpu: list[list[int]] = [[] for _ in range(mix.gpus)]
    load = [0.0] * mix.gpus
    placed: list[tuple[int, tuple[int, ...]]] = []
    order = sorted(range(len(counts)), key=lambda m: (mix.engines[m].gpus, work[m] / counts[m]), reverse=True)
    for model in order:
        for _ in range(counts[model]):
            ranked = sorted(range(mix.gpus), key=lambda gpu: (model in on_gpu[gpu], len(on_gpu[gpu]), load[gpu]))
            gpus = tuple(ranked[: mix.engines[model].gpus])
            for gpu in gpus:
                on_gpu[gpu].append(model)
                load[gpu] += work[model] / counts[model] / len(gpus)
            placed.append((model, gpus))
    return placed


def _parts(mix: Mix, placed: Sequence[tuple[int, tuple[int, ...]]], careful: bool) -> list[Placed]:
    found: list[Placed] = []
    for model, gpus in placed:
        engine, on_it = mix.engines[model], [sum(gpu in others for _, others in placed) for gpu in gpus]
        share = max(on_it)
        slots = engine.within(1 / share) if careful else engine.slots // share
        found.append((model, gpus, max(1, slots), 1.0))
    return found
