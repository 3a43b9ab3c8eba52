"""The worth of dispatch under targets, and the cost of a decision.

Fixed fleets in the simulator: thresholds, every prefill remote, and `slo` for router and prefills. The
traces are recorded ones where they are to be had. Target: on no fleet is `slo` below the better of the other two.

`python -m benchmarks.dispatch --page` writes the table into docs/routing.md. It takes half an hour; with `--facts FILE`
each fleet's row is kept as it comes, and one that is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.harness import Report, at_least, at_most
from benchmarks.measured_pages import write_measured
from benchmarks.traces import Requests, conversation, generated, kept
from dynamo_local.components.dispatcher import sim_picker
from dynamo_local.core.routing.choice import Sample
from dynamo_local.core.routing.decode_choice import SloPicker
from dynamo_local.core.routing.disagg import QueueView
from dynamo_local.core.routing.estimates import Targets, Timing
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.core.routing.prompts import Ask
from dynamo_local.core.types import Load
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.simulator.metrics import measure
from dynamo_local.simulator.options import FleetShape, SimulationOptions, Slo
from dynamo_local.simulator.simulation import Case, run_case
from dynamo_local.simulator.trace import TraceRequest

PAGE = Path(__file__).parents[1] / "docs" / "routing.md"
COMMAND = "python -m benchmarks.dispatch --page"
AZURE, SIN_45 = "azure2023_conv.mooncake.jsonl.gz", "sin_rr5-45_T600_d1800_i3000o300.jsonl.gz"
WORKERS = 64
STREAMS = 64
"""Answers that run on a decode worker whose decision is measured."""
DECISIONS = 2000
COST_TARGET_US = 1000.0
SHORT_REQUESTS = 600


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests, targets in ms, the engine's speed, and the fleets that serve them."""

    name: str
    requests: Callable[[int | None], Requests]
    ttft_ms: float
    itl_ms: float
    speed: float
    fleets: tuple[tuple[int, int], ...]


azure = partial(kept, AZURE, "chat,rate=5.5,isl=900,isl-sigma=0.9,osl=150,reuse=0,system=0")
waves = partial(kept, SIN_45, "sin,rate=25,amplitude=0.8,period=600,duration=1800,isl=3000,osl=300")
BURSTS = "chat,duration=1800,rate=4,cv=3,reuse=0.2"
CODE = "code,duration=1800,rate=12"

TRIALS = (
    Trial(
        "conversation",
        conversation,
        2000,
        50,
        1.0,
        ((2, 1), (3, 1), (4, 1), (2, 2), (1, 3), (4, 4), (0, 4), (3, 2)),
    ),
    Trial("Azure conversation", azure, 2000, 100, 0.1, ((3, 5), (4, 5), (2, 6), (5, 3), (0, 8))),
    Trial("sin 5–45", waves, 200, 10, 1.0, ((3, 3), (4, 3))),
    Trial("`--generate sin`", partial(generated, "sin"), 200, 10, 1.0, ((1, 2), (2, 2))),
    Trial(f"`--generate {BURSTS}`", partial(generated, BURSTS), 2000, 50, 1.0, ((3, 2),)),
    Trial(f"`--generate {CODE}`", partial(generated, CODE), 500, 20, 1.0, ((1, 1), (2, 1))),
)
"""Figures were given for the first three fleets of the first trial and the first two of the second; the others are of
our own choice."""


@dataclass(frozen=True, slots=True)
class Row:
    """Attainment (0..1) of one fleet under each rule; `remote` None: it has no prefill worker."""

    trial: str
    fleet: FleetShape
    threshold: float
    remote: float | None
    slo: float

    @property
    def better(self) -> float:
        """The better of the two others."""
        return max(self.threshold, self.remote or 0.0)


def compare(trial: Trial, shape: tuple[int, int], requests: Sequence[TraceRequest]) -> Row:
    """One fleet under the three rules."""
    fleet, targets = FleetShape(*shape), Targets.of_ms(trial.ttft_ms, trial.itl_ms)
    plain = SimulationOptions(shape=fleet, sim=SimOptions(speed=trial.speed), gpus=16, targets=targets)

    def attained(options: SimulationOptions, router: str = "least-loaded") -> float:
        picker = partial(sim_picker, router, 0, options.sim, targets)  # type: ignore[arg-type]
        run = run_case(requests, Case("", options, make_picker=picker))
        return measure(run, Slo(trial.ttft_ms, trial.itl_ms)).attainment

    return Row(
        trial.name,
        fleet,
        attained(plain),
        attained(replace(plain, conditional=False)) if fleet.prefill else None,
        attained(replace(plain, disagg_policy="slo"), "slo"),
    )


def pick_us() -> list[float]:
    """Microseconds for each choice of a worker among 64."""
    picker = SloPicker(Timing(ProfileModel.load(SimOptions().profile)), Targets.of_ms(2000, 50))
    took: list[float] = []
    for number in range(DECISIONS):
        now_s = number * 0.01
        samples = {
            worker: Sample(Load(worker % 32 + number % 7, 256, 900, 4096, 0, (worker * 37 % 90) / 100), now_s)
            for worker in range(WORKERS)
        }
        began = time.perf_counter()
        worker = picker.pick(range(WORKERS), samples, {}, 2000)
        took.append((time.perf_counter() - began) * 1e6)
        picker.routed(worker, str(number), 200, now_s, 2000)
        if number >= WORKERS * 8:
            for each in range(WORKERS):
                picker.finished(each, str(number - WORKERS * 8), now_s)
    return took


def decide_us() -> list[float]:
    """Microseconds for each decision of a decode worker with 64 streams: here or there."""
    side = DecodeSide(Timing(ProfileModel.load(SimOptions().profile)), Targets.of_ms(2000, 50))
    for number in range(STREAMS):
        name = f"stream {number}"
        side.began(name, 2000, 0.0)
        side.went_local(name, 2000, 0.0)
        side.tokens(name, number + 1, 0.1)
    took = []
    for number in range(DECISIONS):
        began = time.perf_counter()
        ask = Ask(8000 + number, 0, 0.0)
        side.decide(ask, 1.0 + number * 0.001, queue=QueueView(4, 6), prefill_workers=2)
        took.append((time.perf_counter() - began) * 1e6)
    return took


def rows(facts: Path | None = None) -> list[Row]:
    """All fleets. Rows are kept in the file `facts` as they come, and taken from there."""
    kept = {} if facts is None or not facts.exists() else json.loads(facts.read_text(encoding="utf-8"))
    found = []
    for trial in TRIALS:
        requests: list[TraceRequest] | None = None
        for shape in trial.fleets:
            key = f"{trial.name}, {FleetShape(*shape)}"
            if key not in kept:
                requests = requests or trial.requests(None).rows
                kept[key] = asdict(compare(trial, shape, requests))
                if facts is not None:
                    facts.write_text(json.dumps(kept, indent=1), encoding="utf-8")
                print(key, kept[key], flush=True)
            found.append(Row(**{**kept[key], "fleet": FleetShape(*shape)}))
    return found


def run(short: bool) -> Report:
    """The short form takes the first requests of two fleets only, too few for the target."""
    report = Report("dispatch")
    some = ((TRIALS[0], (2, 1)), (TRIALS[1], (3, 5)))
    found = [compare(trial, shape, trial.requests(SHORT_REQUESTS).rows) for trial, shape in some] if short else rows()
    for row in found:
        name = f"{row.trial}, {row.fleet}"
        for rule, value in (("threshold", row.threshold), ("always remote", row.remote), ("slo", row.slo)):
            if value is not None:
                report.add(f"{name}: {rule}", "%", [value * 100])
        gain = [(row.slo - row.better) * 100]
        report.add(f"{name}: slo above the better", "%", gain, None if short else at_least(0.0))
    report.add(f"choice among {WORKERS} workers", "us", pick_us(), at_most(COST_TARGET_US))
    report.add(f"here or there, {STREAMS} streams", "us", decide_us(), at_most(COST_TARGET_US))
    report.notes += [trial.requests(1).told for trial in TRIALS]
    return report


def section(found: Sequence[Row], costs: tuple[Sequence[float], Sequence[float]]) -> str:
    """The measured figures, as markdown."""
    lines = ["| Requests | Fleet | `threshold` | always remote | `slo` |", "|---|---|--:|--:|--:|"]
    for row in found:
        remote = "–" if row.remote is None else f"{row.remote:.2%}"
        lines.append(f"| {row.trial} | {row.fleet} | {row.threshold:.2%} | {remote} | **{row.slo:.2%}** |")
    told = (
        f"- {trial.name}: {trial.requests(1).told}, TTFT {trial.ttft_ms:g} ms, ITL {trial.itl_ms:g} ms"
        + ("" if trial.speed == 1 else f", engines at {trial.speed:g} of their speed")
        for trial in TRIALS
    )
    picks, decisions = (sorted(cost) for cost in costs)
    lines += [
        "",
        *told,
        "",
        f"A choice among {WORKERS} workers takes {picks[len(picks) // 2]:.0f} µs, a decision of a worker with "
        f"{STREAMS} streams {decisions[len(decisions) // 2]:.0f} µs (median of {DECISIONS:,}, one core).",
    ]
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the table into docs/routing.md")
    parser.add_argument("--facts", type=Path, help="keep each fleet's row in this file; one that is there is shown")
    options = parser.parse_args()
    text = section(rows(options.facts), (pick_us(), decide_us()))
    print(text)
    if options.page:
        write_measured(PAGE, COMMAND, text)


if __name__ == "__main__":
    main()
