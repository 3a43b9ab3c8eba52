"""Draw docs/flip.svg: `python docs/flip_picture.py`. A real run: a graph on simulated GPUs, streams, a flip each way.

Times are the event log's, the worker's own ("became …") and the clock's of whoever asks; so each run draws another
picture.
"""

from __future__ import annotations

import asyncio
import html
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.drivers.endpoint_client import endpoint_client  # noqa: E402
from tests.drivers.flips import counts, first_answer_s, flip  # noqa: E402
from tests.drivers.scaled import events, names, settled, streaming  # noqa: E402
from tests.drivers.served import Served, auntil  # noqa: E402

PICTURE = Path(__file__).with_name("flip.svg")
WAYS = (("VllmWorker", "PrefillWorker", "canary"), ("PrefillWorker", "VllmWorker", "generate"))
STREAM_TOKENS = 3000
WIDTH, LEFT, TOP, ROW, LANES = 900, 190, 34, 26, 5
LEGEND = 90
"""From the bars to the right: the title is wider than their labels."""
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
BECAME = re.compile(r"^(\S+ \S+) INFO \S+ became \S+ in [\d.]+ s: (.*)$", re.MULTILINE)
"""A worker's line; its time is that of the end."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Milliseconds since the command. `stages` are the worker's own, in order, the first from `begun`."""

    title: str
    requested: float
    begun: float
    stages: tuple[tuple[str, float], ...]
    answered: float
    flipped: float
    streams: int

    @property
    def end(self) -> float:
        """Where the picture may end."""
        return max(self.answered, self.flipped) + 20.0


async def measured(served: Served, gives: str, takes: str, endpoint: str) -> Flip:
    """One flip beside streams, and then back."""
    victim = names(served, gives)[-1]
    prompts = [f"Tell me about number {n}." for n in range(6)]
    async with streaming(served, *prompts, tokens=STREAM_TOKENS) as streams:
        async with endpoint_client(served, takes, endpoint) as client:
            pid, began_s = served.pids()[victim], time.time()
            took_s = await first_answer_s(served, victim, client)
        still = sum(not stream.done() for stream in streams)
        (became,) = (name for name, of in served.pids().items() if of == pid)
        log = Path(served.worker(became)["log_file"])
        seen = [each for each in events(served) if each["time"] >= began_s]
        found = (await auntil(lambda: BECAME.findall(log.read_text()), what=log.read_text))[-1]
        await settled(served)
        await flip(served, became)
    ended_s = datetime.strptime(found[0], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
    stages = tuple((word.rpartition(" ")[0], 1000 * float(word.rpartition(" ")[2])) for word in found[1].split(", "))
    at = {each["event"]: 1000 * (each["time"] - began_s) for each in reversed(seen)}
    begun = 1000 * (ended_s - began_s) - sum(took for _, took in stages)
    title = f"{victim} becomes {became}"
    return Flip(title, at["FlipRequested"], begun, stages, 1000 * took_s, at["Flipped"], still)


async def run() -> list[Flip]:
    """Both ways, in one graph."""
    with Served(*counts()) as served:
        served.start()
        return [await measured(served, *way) for way in WAYS]


def drawn(flips: list[Flip]) -> str:
    """The picture: a lane each for the arbiter, the worker, whoever asks, and the streams of the old role."""
    scale = (WIDTH - LEFT - 20) / max(each.end for each in flips)
    height = TOP + len(flips) * (LANES * ROW + 30)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="18">Milliseconds since the command; simulated engines, {flips[0].streams} streams '
        "that go on</text>",
    ]
    for number, each in enumerate(flips):
        parts += _lanes(each, TOP + number * (LANES * ROW + 30), scale)
    return "\n".join([*parts, "</svg>", ""])


def _lanes(each: Flip, top: float, scale: float) -> Iterator[str]:
    yield f'<text x="8" y="{top + 16:.0f}" font-weight="bold">{html.escape(each.title)}</text>'
    right = LEFT + each.end * scale
    for lane, label in enumerate(
        ("arbiter commits", "the worker", "first answer, new role", "its streams, old role"), 1
    ):
        y = top + lane * ROW
        yield f'<text x="8" y="{y + 16:.0f}">{label}</text>'
        yield f'<line x1="{LEFT}" x2="{right:.1f}" y1="{y + ROW:.0f}" y2="{y + ROW:.0f}" stroke="#eee"/>'
    for at, label in ((each.requested, "flipping"), (each.flipped, "new name")):
        yield _mark(at, label, top + ROW, scale)
    begun = each.begun
    for number, (stage, took) in enumerate(each.stages):
        x, wide = LEFT + begun * scale, max(1.0, took * scale)
        colour, tip = COLOURS[number % len(COLOURS)], f"{stage}: {took:.0f} ms"
        yield f'<rect x="{x:.1f}" y="{top + 2 * ROW + 4:.0f}" width="{wide:.1f}" height="{ROW - 8}" fill="{colour}">'
        yield f"<title>{html.escape(tip)}</title></rect>"
        begun += took
    yield _mark(each.answered, "answered", top + 3 * ROW, scale)
    y = top + 4 * ROW
    yield f'<rect x="{LEFT}" y="{y + 4:.0f}" width="{right - LEFT:.1f}" height="{ROW - 8}" fill="#ddd"/>'
    x = LEFT + LEGEND
    for number, (stage, took) in enumerate(each.stages):
        words = f"{stage} {took:.0f}"
        yield f'<rect x="{x}" y="{top + 6}" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>'
        yield f'<text x="{x + 13}" y="{top + 16:.0f}">{html.escape(words)}</text>'
        x += 28 + 7 * len(words)


def _mark(at: float, label: str, y: float, scale: float) -> str:
    x = LEFT + at * scale
    return (
        f'<circle cx="{x:.1f}" cy="{y + ROW / 2:.1f}" r="4"/>'
        f'<text x="{x + 7:.1f}" y="{y + 17:.1f}">{label}, {at:.0f} ms</text>'
    )


def main() -> None:
    """Run, and write it."""
    PICTURE.write_text(drawn(asyncio.run(run())), encoding="utf-8")


if __name__ == "__main__":
    main()
