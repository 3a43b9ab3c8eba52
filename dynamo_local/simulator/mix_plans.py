"""`dynamo plan --model` and `dynamo simulate --model`: several models that share GPUs, beside GPUs of their own.

An engine is a few numbers here (`mix.Engine`), made of a measured profile. A pass of n requests also carries the
prompts that come while they run: `pass(n) = decode(n) + n × prefill ÷ answer's length`, as in a worker that does both.
With `prefill` workers beside it a pass carries none. The hand-over of KV takes no time here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import ConfigDict, Field

from dynamo_local.config.schema import SharingArgs
from dynamo_local.core.gpu_shares import Sharing
from dynamo_local.core.types import SECONDS_MAX
from dynamo_local.errors import BadInput
from dynamo_local.profile.document import read_document
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.reading import profile_folder
from dynamo_local.sdk.settings import validate_section
from dynamo_local.simulator.generator import KINDS, GeneratorOptions, generate, parse_generated
from dynamo_local.simulator.mix import Engine, Fixed, Mix, Policy, Request, Result, Shared, World, fixed_workers, within
from dynamo_local.simulator.trace import TraceRequest, read_trace

START_S = 30.0
"""Start of a worker if neither the user nor the profile says it."""
LEAVES_S = 1.0
"""An idle worker that leaves, or falls asleep, frees its GPUs after about so long."""
SEQUENCES_MAX = 256
"""Requests that one worker serves at once, at most, if the profile does not say it."""
WORKERS_MAX = 64
NOT_JUDGED = 0.2
"""Requests of this share of the time, from the beginning, are served and not judged: no worker is there yet."""

_SHARING = {each.name for each in fields(Sharing)}
_Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)]
_Milliseconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class ModelWords(SharingArgs):
    """The keys of `--model NAME=LOAD,KEY=VALUE…` beside those of the load. Targets are in ms."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str | None = None
    gpus: Annotated[int, Field(ge=1, le=64)] | None = None
    prefill: Annotated[int, Field(ge=0, le=8)] = 0
    ttft: _Milliseconds | None = None
    itl: _Milliseconds | None = None
    start_s: _Seconds | None = None
    wake_s: _Seconds | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its engine and its requests."""

    name: str
    engine: Engine
    requests: Sequence[TraceRequest]


@dataclass(frozen=True, slots=True)
class Judged:
    """A run of all models. `kept`: for each, how many requests were judged, and how many are within the targets."""

    gpus: int
    kept: Mapping[str, tuple[int, int]]
    result: Result
    requests: Sequence[Request]
    begins_s: float
    """Requests from then on are judged."""

    def judged(self, model: int) -> list[int]:
        """The numbers of the model's requests that are judged."""
        found = enumerate(self.requests)
        return [number for number, each in found if each.model == model and each.at_s >= self.begins_s]

    @property
    def share(self) -> float:
        """The share of the judged requests that is within the targets."""
        came, kept = (sum(each) for each in zip(*self.kept.values(), strict=True))
        return kept / max(1, came)


@dataclass(frozen=True, slots=True)
class Planned:
    """`together` is the run on the fewest GPUs that keep the targets, or on all of them if not `attained`.

    `apart`: the GPUs that each model needs if it has its own; None: no number of workers is enough.
    """

    attained: bool
    together: Judged
    apart: Mapping[str, int | None]


def parse_model(text: str, usual: Mapping[str, object], limit: int | None) -> Loaded:
    """`a=FILE,gpus=2,ttft=500` or `a=chat,rate=2,…`. `usual`: values for all models. Raises `BadInput`, `BadTrace`."""
    name, equals, rest = text.partition("=")
    load, *words = (word.strip() for word in rest.split(","))
    if not equals or not name.strip() or not load:
        raise BadInput(f"--model {text!r}: it is NAME=TRACE, or NAME=chat,rate=2 (docs/models.md)")
    own, generated = dict[str, object](), list[str]()
    for word in words:
        key, given, value = (part.strip() for part in word.partition("="))
        if not given or not key or not value:
            raise BadInput(f"--model {name}: {word!r} is no KEY=VALUE, such as gpus=2")
        if load in KINDS and key.replace("-", "_") in GeneratorOptions.model_fields:
            generated.append(word)
        elif key in own:
            raise BadInput(f"--model {name}: {key} is given twice; keep one")
        else:
            own[key] = value
    said = validate_section(ModelWords, f"--model {name}", own)
    filled = said.model_copy(update={key: value for key, value in usual.items() if getattr(said, key) is None})
    if load in KINDS:
        requests = list(islice(generate(parse_generated(",".join((load, *generated))).options), limit))
    else:
        requests = read_trace(Path(load), limit=limit)
    return Loaded(name.strip(), engine_of(name.strip(), filled, requests), requests)


def engine_of(name: str, words: ModelWords, requests: Sequence[TraceRequest]) -> Engine:
    """The model's engine for requests of these lengths, from its profile. Raises `BadInput`, `ConfigError`."""
    if words.profile is None:
        raise BadInput(f"--model {name}: whose times has it? Give profile=NAME there, or --profile for all")
    if words.ttft is None:
        raise BadInput(f"--model {name}: there is no target: give ttft=MS there, or --ttft for all")
    model = ProfileModel.load(words.profile)
    document = read_document(profile_folder(words.profile))
    facts = None if document is None else document.serving
    measured_s = None if document is None else document.cold_start_s
    isl, osl = fmean(each.input_length for each in requests), fmean(each.output_length for each in requests)
    context = isl + osl / 2
    most = min(SEQUENCES_MAX if facts is None else facts.max_num_seqs, math.floor(model.max_kv_tokens / (isl + osl)))

    def pass_s(count: int) -> float:
        prompts_s = 0.0 if words.prefill else count * model.prefill_s(0, round(isl)) / osl
        return model.itl_s(round(count * context), context) + prompts_s

    slots = _most_within(pass_s, most, math.inf if words.itl is None else words.itl / 1000)
    if most < 1:
        raise BadInput(f"--model {name}: a request of {isl + osl:.0f} tokens is longer than the profile's KV cache")
    if slots < 1:
        raise BadInput(
            f"--model {name}: by the profile {words.profile} one request alone has {pass_s(1) * 1000:.1f} ms between "
            f"its tokens; the target is {words.itl:g} ms"
        )
    slots = min(slots, words.slots or slots)
    alone_s, full_s = pass_s(1), pass_s(slots)
    slope = (full_s - alone_s) / max(1, slots - 1)
    base_s = max(alone_s - slope, alone_s * 1e-3)
    gpus = words.gpus or (1 if facts is None else max(1, facts.gpus))
    start_s = words.start_s or measured_s or START_S
    return Engine(
        gpus=gpus * (1 + words.prefill),
        slots=slots,
        prefill_s=model.ttft_s(round(isl)) / isl,
        alone_s=base_s,
        grows=base_s / slope if slope > 0 else math.inf,
        ttft_s=words.ttft / 1000,
        itl_s=full_s if words.itl is None else words.itl / 1000,
        start_s=start_s,
        wake_s=words.wake_s or start_s,
        sleep_s=LEAVES_S,
        parked=WORKERS_MAX if words.wake_s else 0,
        prompts=max(1, words.prefill),
        sharing=Sharing(**words.model_dump(include=_SHARING)),
    )


def _most_within(pass_s: Callable[[int], float], most: int, target_s: float) -> int:
    """The largest batch whose pass is within the target; 0: none is."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pass_s(middle) <= target_s else (low, middle - 1)
    return low


def together(models: Sequence[Loaded], gpus: int, policy: Policy | None = None) -> Judged:
    """All models on so many GPUs, shared by our rule or under that policy.

    Raises `BadInput` if their floors do not fit.
    """
    if policy is None and (floors := _floors(models)) > gpus:
        raise BadInput(f"the floors of the models need {floors} GPUs, and there are {gpus}; lower one (floor=0)")
    rows = sorted(
        (each.at_s, number, each.input_length, each.output_length)
        for number, model in enumerate(models)
        for each in model.requests
    )
    requests = [Request(*row) for row in rows]
    length_s = max(each.at_s for each in requests)
    engines = tuple(each.engine for each in models)
    mix = Mix(gpus=gpus, engines=engines, length_s=length_s, warm_up_s=length_s * NOT_JUDGED)
    result = World(mix, requests, policy or Shared()).run()
    kept = {models[number].name: counts for number, counts in within(mix, requests, result).items()}
    return Judged(gpus, kept, result, requests, mix.warm_up_s)


def plan(
    models: Sequence[Loaded], gpus: int, attainment: float, tell: Callable[[str], None] = lambda text: None
) -> Planned:
    """The fewest GPUs on which the models together keep the targets, and those that each needs alone."""
    least = max(_floors(models), *(each.engine.gpus for each in models))
    if least > gpus:
        raise BadInput(f"the models need {least} GPUs, by their largest worker and their floors; there are {gpus}")
    for count in range(least, gpus + 1):
        judged = together(models, count)
        tell(f"{count} GPU{'s' * (count != 1)}: {judged.share:.1%}")
        if judged.share >= attainment:
            break
    return Planned(judged.share >= attainment, judged, _apart(models, attainment))


def _floors(models: Sequence[Loaded]) -> int:
    """GPUs of the workers that must always be there."""
    return sum(each.engine.sharing.floor * each.engine.gpus for each in models)


def _apart(models: Sequence[Loaded], attainment: float) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for model in models:
        enough = (gpus for gpus, (came, kept) in fixed_curve(model) if kept >= attainment * came)
        found[model.name] = next(enough, None)
    return found


def fixed_curve(model: Loaded, gpus: int | None = None) -> Iterator[tuple[int, tuple[int, int]]]:
    """GPUs of its own, and how many requests were judged and kept on them, until more workers are of no use."""
    most, best = WORKERS_MAX if gpus is None else gpus // model.engine.gpus, 0
    for count in range(1, most + 1):
        placed = Fixed(fixed_workers([model.engine], [0] * count))
        came, kept = together([model], count * model.engine.gpus, placed).kept[model.name]
        if kept <= best and best:
            return
        yield count * model.engine.gpus, (came, kept)
        if kept == came:
            return
        best = kept


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of each model for the whole time, and the share of requests that is within the targets on them."""

    gpus: Mapping[str, int]
    share: float


def best_splits(models: Sequence[Loaded], gpus: int) -> tuple[Split, Split | None]:
    """The fixed splits that keep the most requests within targets: of all, and of those that give each model a worker.

    None where the GPUs are too few for one worker of each.
    """
    curves, total = list[dict[int, int]](), 0
    for model in models:
        points = dict(fixed_curve(model, gpus))
        total += max((came for came, _ in points.values()), default=0)
        curves.append({count: kept for count, (_, kept) in points.items()})
    names = [model.name for model in models]

    def best(curves: Sequence[Mapping[int, int]]) -> Split:
        parts, kept = most_kept(curves, gpus)
        return Split(dict(zip(names, parts, strict=True)), kept / max(1, total))

    fits = sum(model.engine.gpus for model in models) <= gpus
    return best([{0: 0, **curve} for curve in curves]), best(curves) if fits else None


def most_kept(curves: Sequence[Mapping[int, int]], units: int) -> tuple[tuple[int, ...], int]:
    """One point of each curve (units -> requests kept), with at most so many units together and the most kept."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for curve in curves:
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for used, (kept, parts) in best.items():
            for more, gained in curve.items():
                total = used + more
                if total <= units and kept + gained > following.get(total, (-1, ()))[0]:
                    following[total] = kept + gained, (*parts, more)
        best = following
    kept, parts = max(best.values())
    return parts, kept
