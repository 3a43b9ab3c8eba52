"""The cases on vLLM's CPU build: `tox -e vllm`, and the shortest of each kind in `tox -e vllm-short`."""

from __future__ import annotations

import pytest

from tests.vllm import cases

pytestmark = [pytest.mark.vllm, pytest.mark.infra, pytest.mark.timeout(1500)]


class TestAggregated(cases.Aggregated):
    """One worker that does all."""


class TestDisaggregated(cases.Disaggregated):
    """Prefill and decode apart."""


class TestRouted(cases.Routed):
    """KV-aware routing."""


class TestLeaving(cases.Leaving):
    """Workers come and go."""


class TestKilled(cases.Killed):
    """SIGKILL."""


class TestPrefillDies(cases.PrefillDies):
    """A prefill worker is killed under load."""


class TestPlanned(cases.Planned):
    """The load planner."""
