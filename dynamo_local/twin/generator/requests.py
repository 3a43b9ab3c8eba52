"""Times, lengths and shared beginnings, put together into requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from dynamo_local.twin.generator.arrivals import arrivals
from dynamo_local.twin.generator.options import GeneratorOptions
from dynamo_local.twin.generator.prefixes import Prefixes
from dynamo_local.twin.trace import TraceRequest


def generate(options: GeneratorOptions) -> Iterator[TraceRequest]:
    """The requests, one at a time, in the order of their times; the first at 0 s. The same options, the same requests.

    Chance is `random.Random` of the standard library (Mersenne Twister), whose `random()` is the same on every
    platform and in every version of Python; its Gamma and normal variates have not changed either, and a test would
    notice. Times are whole milliseconds and lengths whole tokens, so that the last bits of a platform's `sin` and
    `exp` do not show. Times, lengths and prefixes have generators of their own: a change of `isl` moves no arrival.
    """
    prompts, answers = (Random(f"{options.seed}/{what}") for what in ("isl", "osl"))
    prefixes = Prefixes(options, Random(f"{options.seed}/prefixes"))
    for at_s in arrivals(options, Random(f"{options.seed}/arrivals")):
        rounded_s = round(at_s * 1000) / 1000
        isl = _length(prompts, options.isl, options.isl_sigma, options.isl_max)
        osl = _length(answers, options.osl, options.osl_sigma, options.osl_max)
        yield TraceRequest(rounded_s, isl, osl, prefixes.ids_of(rounded_s, isl, osl))


def _length(rng: Random, median: int, sigma: float, most: int) -> int:
    if sigma == 0:
        return median
    return max(1, min(most, round(rng.lognormvariate(math.log(median), sigma))))
