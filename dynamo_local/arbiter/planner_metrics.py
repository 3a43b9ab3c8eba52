"""The planner's part of `/metrics`, under Dynamo's names: observed, predicted, estimated and decided values.

A gauge has the value of the last decision that concerned it. If that decision did not know it, or the planner does not
run, there is no sample. A dashboard then shows a gap, not a 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.loop import Counts, PlannerState
from dynamo_local.planner.plugins.registration import GAUGE
from dynamo_local.planner.plugins.registry import BOUNDS_S, COUNTERS, HISTOGRAMS, Counters, PluginRow
from dynamo_local.planner.records import figures
from dynamo_local.planner.records.decision_log import DecisionRecord, as_json
from dynamo_local.planner.records.figures import Figures
from dynamo_local.planner.values import FixedFleet, Observation
from dynamo_local.profile.judgement import Drifted

PREFIX = "dynamo_planner"

WINDOW = {
    "observed_requests_per_second": "Requests per second in the last window",
    "observed_input_sequence_tokens": "Mean prompt of the last window, tokens",
    "observed_output_sequence_tokens": "Mean answer of the last window, tokens",
    "observed_ttft_ms": "Mean time to first token of the last window, ms",
    "observed_itl_ms": "Mean gap between tokens of the last window, ms",
    "observed_request_duration_seconds": "Mean duration of a request of the last window",
    "predicted_requests_per_second": "Requests per second that are expected of the window that is planned for",
    "predicted_input_sequence_tokens": "Mean prompt that is expected, tokens",
    "predicted_output_sequence_tokens": "Mean answer that is expected, tokens",
    "engine_prefill_capacity_requests_per_second": "Requests per second that a prefill worker takes within its target",
    "engine_decode_capacity_requests_per_second": "Requests per second that a decode worker takes within its target",
}
LATENCY = {
    "estimated_ttft_ms": "Time to first token that is estimated for the next request on the worst engine, ms",
    "estimated_itl_ms": "Gap between tokens that is estimated on the worst engine, ms",
}
DECIDED = {
    "predicted_num_prefill_replicas": "Prefill workers as last decided",
    "predicted_num_decode_replicas": "Decode (or aggregated) workers as last decided",
    "sla_target_ttft_ms": "The target for the mean time to first token, ms; policies with targets have it",
    "sla_target_itl_ms": "The target for the mean gap between tokens, ms",
}
RATIO = "fixed_fleet_gpu_hours_ratio"
RATIO_TEXT = (
    "GPU-hours of slo in the last day, over those of the cheapest fixed fleet for the same share of requests. In the "
    "first hours: of the last hour"
)
REPLICAS = {
    "num_prefill_replicas": "Prefill workers that are ready",
    "num_decode_replicas": "Decode (or aggregated) workers that are ready",
}
ENGINE: Mapping[str, tuple[str, Callable[[ForwardPass], int]]] = {
    "engine_queued_prefill_tokens": (
        "Tokens of the prompts that wait in an engine",
        lambda last: last.queued.sum_prefill_tokens,
    ),
    "engine_queued_decode_kv_tokens": (
        "KV tokens of the decodes that wait in an engine",
        lambda last: last.queued.sum_decode_kv_tokens,
    ),
    "engine_inflight_decode_kv_tokens": (
        "KV tokens of the decodes that an engine runs",
        lambda last: last.scheduled.sum_decode_kv_tokens,
    ),
}
ENUMS = {
    figures.LOAD: "1 for what the load loop did last, by component",
    figures.THROUGHPUT: "1 for what the throughput loop did last, by component",
}


@dataclass(frozen=True, slots=True)
class PlannerNow:
    """The planner at a scrape.

    `since_s` is when it entered its state, on its clock. `gpu_hours` are those of the components that it plans (None
    before the first observation). `drift` says how far engines are off their profile. `fixed_fleet` is what
    `slo` compares itself with.
    """

    state: PlannerState = PlannerState.STOPPED
    counts: Counts = field(default_factory=Counts)
    dropped: int = 0
    since_s: float = 0.0
    gpu_hours: float | None = None
    drift: tuple[Drifted, ...] = ()
    fixed_fleet: FixedFleet | None = None


@dataclass(slots=True)
class _Group:
    """Figures of the last decision that concerned them, made at `at_s`."""

    at_s: float = 0.0
    values: Figures = field(default_factory=dict)

    def take(self, at_s: float, values: Figures | None) -> None:
        if values is not None:
            self.at_s, self.values = at_s, values

    def since(self, since_s: float) -> Figures:
        return self.values if self.at_s >= since_s else {}


class PlannerGauges(Collector):
    """A `PlannerObserver` that is the collector of its gauges."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], PlannerNow]) -> None:
        self._now = now
        self._window, self._latency, self._decided = _Group(), _Group(), _Group()
        self._states: dict[str, dict[str, dict[str, str]]] = {name: {} for name in ENUMS}
        self._observation: Observation | None = None
        registry.register(self)

    @property
    def components(self) -> tuple[str, ...]:
        """The planned components of the last pull."""
        return () if self._observation is None else tuple(pool.component for pool in self._observation.pools.all)

    def on_observation(self, observation: Observation) -> None:
        self._observation = observation

    def on_decision(self, record: DecisionRecord) -> None:
        line, at_s = as_json(record), record.decision.now_s
        self._window.take(at_s, figures.window_figures(line))
        self._latency.take(at_s, figures.latency_figures(line))
        self._decided.take(at_s, figures.fleet_figures(line))
        decided = figures.scaling_decisions(line)
        for name, states in self._states.items():
            # A tick in which that loop was not due says nothing about it.
            due = {component: both for component, both in decided.items() if both[name] != "unset"}
            self._states[name] = {
                component: due.get(component, states.get(component, decided[component])) for component in decided
            }

    def describe(self) -> Iterator[Metric]:
        return self._families(PlannerNow())

    def collect(self) -> Iterator[Metric]:
        return self._families(self._now())

    def _families(self, now: PlannerNow) -> Iterator[Metric]:
        observation = None if now.state is PlannerState.STOPPED else self._observation
        if observation is not None and observation.at_s < now.since_s:
            observation = None
        yield from _gauges(REPLICAS, {} if observation is None else _replicas(observation))
        runs = now.state is PlannerState.RUNNING
        for names, group in ((DECIDED, self._decided), (WINDOW, self._window), (LATENCY, self._latency)):
            yield from _gauges(names, group.since(now.since_s) if runs else {})
        hours = {} if now.gpu_hours is None else {"gpu_hours": now.gpu_hours}
        yield from _gauges({"gpu_hours": "GPU-hours of the planned components, since this arbiter's start"}, hours)
        fixed = now.fixed_fleet if runs else None
        yield from _gauges({RATIO: RATIO_TEXT}, {} if fixed is None else {RATIO: fixed.ratio})
        yield _drift(now.drift)
        yield from self._enums(runs and self._decided.at_s >= now.since_s)
        yield from _engines(observation)

    def _enums(self, known: bool) -> Iterator[Metric]:
        for name, text in ENUMS.items():
            label = f"{PREFIX}_{name}"
            family = GaugeMetricFamily(label, text, labels=["component", label])
            for component, both in self._states[name].items() if known else ():
                for state in figures.STATES[name]:
                    family.add_metric([component, state], float(both[name] == state))
            yield family


def _replicas(observation: Observation) -> Figures:
    return {f"num_{role}_replicas": pool.ready for role, pool in observation.pools.by_role.items()}


def _gauges(names: Mapping[str, str], values: Figures) -> Iterator[Metric]:
    for name, text in names.items():
        family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[])
        if name in values:
            family.add_metric([], values[name])
        yield family


def _drift(drift: Iterable[Drifted]) -> Metric:
    text = "How far the engines' passes are off the profile that is planned by, as a share (0.2: a fifth longer)"
    family = GaugeMetricFamily(f"{PREFIX}_profile_drift_ratio", text, labels=["component", "kind", "quantile"])
    for each in drift:
        for quantile, share in (("0.5", each.p50), ("0.9", each.p90)):
            family.add_metric([each.component, each.kind, quantile], share)
    return family


def _engines(observation: Observation | None) -> Iterator[Metric]:
    """One sample for each rank of each worker in the last pull."""
    engines = {} if observation is None else observation.engines
    for name, (text, tokens) in ENGINE.items():
        family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["worker_id", "dp_rank"])
        for engine, seen in engines.items():
            if not isinstance(seen.last, Missing):
                family.add_metric([engine.worker_id, str(engine.dp_rank)], tokens(seen.last))
        yield family


LAG_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class PlannerMetrics:
    """All metrics of a planner in one registry. A `PlannerObserver`."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], PlannerNow] = PlannerNow) -> None:
        self.registry = registry
        self._now = now
        registry.register(_Gauges(now))
        self.gauges = PlannerGauges(registry, now)
        self.tick_lag = Histogram(
            f"{PREFIX}_tick_lag_seconds", "By how much each tick came late", buckets=LAG_BUCKETS, registry=registry
        )
        self.decisions = Counter(
            f"{PREFIX}_decisions",
            "Decisions about each component, by the rule that decided; a hold is one, too",
            ["component", "rule"],
            registry=registry,
        )
        self.scale_actions = Counter(
            f"{PREFIX}_scale_actions",
            "Steps that were decided, and what came of them: committed, refused, no_operation or deferred; "
            "in a virtual environment written or skipped",
            ["component", "direction", "outcome"],
            registry=registry,
        )

    def on_observation(self, observation: Observation) -> None:
        self.gauges.on_observation(observation)
        self.tick_lag.observe(self._now().counts.lag_s)

    def on_decision(self, record: DecisionRecord) -> None:
        self.gauges.on_decision(record)
        for reason in record.decision.reasons:
            self.decisions.labels(reason.component, reason.rule).inc()
        for component, outcome in record.outcomes.items():
            direction = "up" if record.decision.steps[component] > 0 else "down"
            self.scale_actions.labels(component, direction, outcome.outcome).inc()


class _Gauges(Collector):
    def __init__(self, now: Callable[[], PlannerNow]) -> None:
        self._now = now

    def describe(self) -> Iterator[Metric]:
        return _loop_families(PlannerNow())

    def collect(self) -> Iterator[Metric]:
        return _loop_families(self._now())


def _loop_families(now: PlannerNow) -> Iterator[Metric]:
    state = GaugeMetricFamily(f"{PREFIX}_state", "1 for the state that the planner is in", labels=["state"])
    for each in PlannerState:
        state.add_metric([each], float(each is now.state))
    yield state
    ticks, failed = now.counts.pulls, now.counts.failed_ticks
    yield CounterMetricFamily(f"{PREFIX}_ticks", "Ticks: pulls of the metrics, failed ones included", ticks)
    yield CounterMetricFamily(f"{PREFIX}_failed_ticks", "Ticks that raised; each was tried again", failed)
    held = GaugeMetricFamily(
        f"{PREFIX}_loop_held_max_seconds",
        "The longest that one step of a tick, or of asking a source, held the arbiter's loop so far; on a busy host "
        "the wall clock counts what others had of the core",
        labels=["work", "clock"],
    )
    for work, longest in now.counts.latency.longest.items():
        held.add_metric([work, "wall"], longest.elapsed_s)
        held.add_metric([work, "cpu"], longest.cpu_s)
    yield held
    yield CounterMetricFamily(
        f"{PREFIX}_tensorboard_dropped_points", "TensorBoard points that never reached the disk", now.dropped
    )


# The planner's plugins, under Dynamo's names. One name differs: Dynamo's `tick_lag_seconds` is
# `plugin_tick_lag_seconds` here, because the planner's own ticks had that name before. A plugin's samples disappear
# with it.

TOLD = {
    "plugin_evaluations_total": "Calls of a plugin, by what it answered",
    "plugin_held_over_total": "Ticks in which a plugin's last answer stood, because it was not due",
    "reject_short_circuited_total": "Ticks that a plugin ended by rejecting",
    "tick_skipped_total": "Ticks in which a plugin was not due",
    "tick_requires_unsatisfied_total": "Ticks in which a plugin was not asked, because what it requires was not there",
    "reconcile_clamped_total": "Targets that a bound of a plugin changed while proposals were reconciled",
    "constrain_capped_total": "Targets that a plugin capped",
    "tick_timeout_total": "Ticks in which plugins together took too long",
    "plugin_latency_seconds": "How long a plugin took to answer",
    "tick_duration_seconds": "How long the plugins of a tick took together",
    "plugin_circuit_state": "0: the plugin is asked; 1: it is left alone after failures; 0.5: it is tried again",
    "plugin_cache_age_seconds": "How old a plugin's answer is that still stands",
    "plugin_tick_lag_seconds": "By how much a plugin was asked late",
    "plugin_override_active": "1 for the kinds of targets that a plugin's last answer had",
}


@dataclass(frozen=True, slots=True)
class PluginsNow:
    """The plugins at a scrape, and their counters."""

    rows: tuple[PluginRow, ...] = ()
    counters: Counters = field(default_factory=Counters)


class PluginMetrics(Collector):
    """Collects the plugins' metrics. `now` is called at each scrape."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], PluginsNow] = PluginsNow) -> None:
        self._now = now
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return _families(PluginsNow())

    def collect(self) -> Iterator[Metric]:
        return _families(self._now())


def _families(now: PluginsNow) -> Iterator[Metric]:
    for name, labels in COUNTERS.items():
        counter = CounterMetricFamily(f"{PREFIX}_{name.removesuffix('_total')}", TOLD[name], labels=labels)
        for values, total in now.counters.totals[name].items():
            counter.add_metric(values, total)
        yield counter
    for name, labels in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"{PREFIX}_{name}", TOLD[name], labels=labels)
        for values, took in now.counters.durations[name].items():
            bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
            histogram.add_metric(values, list(zip(bounds, accumulate(took.buckets), strict=True)), took.sum_s)
        yield histogram
    yield from _of_rows(now.rows)


def _of_rows(rows: tuple[PluginRow, ...]) -> Iterator[Metric]:
    circuit, age, lag = (
        GaugeMetricFamily(f"{PREFIX}_{name}", TOLD[name], labels=["plugin_id"])
        for name in ("plugin_circuit_state", "plugin_cache_age_seconds", "plugin_tick_lag_seconds")
    )
    name = "plugin_override_active"
    active = GaugeMetricFamily(f"{PREFIX}_{name}", TOLD[name], labels=["plugin_id", "stage", "override_type"])
    for row in rows:
        circuit.add_metric([row.plugin_id], GAUGE[row.circuit_state])
        lag.add_metric([row.plugin_id], row.tick_lag_seconds)
        if row.cache_age_seconds is not None:
            age.add_metric([row.plugin_id], row.cache_age_seconds)
        for kind in row.override_types:
            active.add_metric([row.plugin_id, row.plugin_type, kind], 1.0)
    yield from (circuit, age, lag, active)
