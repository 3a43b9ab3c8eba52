"""The cases on vLLM's CPU build: `tox -e vllm`, and those that are not `full` in `tox -e vllm-short`."""

from __future__ import annotations

import pytest

from tests.vllm import cases, flip_cases, planned_cases, profile_cases, spare_cases

pytestmark = [pytest.mark.vllm, pytest.mark.infra, pytest.mark.timeout(1500)]


@pytest.mark.full
class TestAggregated(cases.Aggregated):
    """One worker that does all."""


class TestDisaggregated(cases.Disaggregated):
    """Prefill and decode apart."""


@pytest.mark.full
class TestFlipping(flip_cases.Flipping):
    """Prefill workers become decode workers, and back."""


@pytest.mark.full
class TestSpared(spare_cases.PrewarmedPool):
    """Workers that were spares."""


@pytest.mark.full
class TestRouted(cases.Routed):
    """KV-aware routing."""


@pytest.mark.full
class TestLeaving(cases.Leaving):
    """Workers come and go."""


@pytest.mark.full
class TestKilled(cases.Killed):
    """SIGKILL."""


@pytest.mark.full
class TestLost(cases.Lost):
    """Streams survive their worker."""


@pytest.mark.full
class TestPrefillDies(cases.PrefillDies):
    """A prefill worker is killed under load."""


@pytest.mark.full
class TestPlanned(cases.Planned):
    """The load planner."""


@pytest.mark.full
class TestPlannedByTargets(planned_cases.PlannedByTargets):
    """The policy `slo`."""


@pytest.mark.full
@pytest.mark.timeout(3000)
class TestProfiled(profile_cases.Profiled):
    """`dynamo profile`."""
