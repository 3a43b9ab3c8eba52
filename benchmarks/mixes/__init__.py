"""Several models on the GPUs of one host: our decision, beside what others do, on made and recorded mixes.

A small simulator judges: see `world`. `python -m benchmarks.mixes` runs all mixes.
"""

from __future__ import annotations

from benchmarks.harness import Report

FAMILIES = ("bursts", "hot", "zipf", "phases")
SHORT, LONG = ("3 on 2",), ("2 on 1", "3 on 2", "3 on 8", "6 on 8", "12 on 8")
SEED = 2
LOAD = 0.2


def run(short: bool) -> Report:
    """One mix of each family and size at one load factor: the share of requests within targets under each policy."""
    from benchmarks.mixes.judge import POLICIES, share_with
    from benchmarks.mixes.made import mix_of

    report = Report("mixes")
    mixes = [mix_of(family, size, SEED) for family in FAMILIES for size in (SHORT if short else LONG)]
    for policy in POLICIES:
        samples = [100 * share_with(mix, policy, mix.at(LOAD)) for mix in mixes]
        report.add(f"{policy}: requests within targets at load {LOAD:g}", "%", samples)
    report.notes.append(f"{len(mixes)} made mixes, one sample each; python -m benchmarks.mixes runs ten seeds")
    return report
