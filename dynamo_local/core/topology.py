"""Which GPUs belong together: the best-connected set of a given size.

Scores order links, they are no bandwidths. NVLink beats every PCIe path; among PCIe paths the common ancestor
decides (the order of NVML's `nvmlGpuTopologyLevel_t`, printed by `nvidia-smi topo -m` as PIX, PXB, PHB, NODE, SYS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

LINK_UNKNOWN = 0
LINK_SYSTEM = 10
"""Across CPU sockets."""
LINK_NODE = 20
"""Same NUMA node, different host bridges."""
LINK_HOSTBRIDGE = 30
LINK_MULTIPLE = 40
"""Several PCIe switches."""
LINK_SINGLE = 50
"""One PCIe switch."""
LINK_INTERNAL = 60
"""Same board."""
LINK_NVLINK = 1000
"""NVLink; the number of links is added, so that NV4 beats NV2."""

EXACT_SEARCH_MAX = 16
"""GPUs up to which every set is tried: 12,870 sets at worst (8 of 16), some 50 ms."""

Score = Callable[[int, int], int]
"""Link score of two positions; symmetric."""


def best_set(total: int, count: int, score: Score) -> tuple[int, ...]:
    """The `count` of `total` positions to hand out, ascending. Needs 0 <= count <= total.

    1. The strongest weakest link (an all-reduce runs at the pace of its slowest link), then the strongest sum.
    2. Best fit: the least link strength cut between the set and what remains, so that well-connected
       sets stay whole for a later, larger ask.
    3. The lowest positions: the same input always gives the same answer.

    Exact up to `EXACT_SEARCH_MAX` positions; above, one set is grown from each position and the best taken.
    """
    if not 0 <= count <= total:
        raise ValueError(f"cannot choose {count} of {total}")
    matrix = [[score(a, b) if a != b else 0 for b in range(total)] for a in range(total)]
    strength = [sum(row) for row in matrix]
    if total <= EXACT_SEARCH_MAX:
        candidates = list(combinations(range(total), count))
    else:
        candidates = sorted({_grow(seed, count, matrix) for seed in range(total)}) if count else [()]
    return min(candidates, key=lambda chosen: _cost(chosen, matrix, strength))


def _cost(chosen: Sequence[int], matrix: list[list[int]], strength: list[int]) -> tuple[int, int, int, Sequence[int]]:
    weakest, inside = 0, 0
    if len(chosen) > 1:
        links = [matrix[a][b] for a, b in combinations(chosen, 2)]
        weakest, inside = min(links), sum(links)
    cut = sum(strength[a] for a in chosen) - 2 * inside
    return -weakest, -inside, cut, chosen


def _grow(seed: int, count: int, matrix: list[list[int]]) -> tuple[int, ...]:
    chosen = [seed]
    while len(chosen) < count:
        rest = [i for i in range(len(matrix)) if i not in chosen]
        chosen.append(max(rest, key=lambda i: (min(matrix[i][j] for j in chosen), sum(matrix[i][j] for j in chosen))))
    return tuple(sorted(chosen))
