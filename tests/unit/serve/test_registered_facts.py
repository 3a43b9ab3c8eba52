"""What a worker's key in the registry may say, and what is taken from it."""

from __future__ import annotations

import logging

import pytest

from dynamo_local.serve.registrations import _endpoints

KEY = "dynamo/workers/dynamo_VllmWorker:2a"
OWN = "dynamo/components/VllmWorker/generate:2a"


def test_endpoints_under_the_lease_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    assert _endpoints(KEY, {"endpoints": [OWN]}, "2a") == (OWN,)
    assert _endpoints(KEY, {}, "2a") == ()
    assert caplog.records == []


@pytest.mark.parametrize("told", [[OWN, "dynamo/VllmWorker/generate"], [OWN, 7], [OWN, OWN.replace("2a", "12a:b")]])
def test_others_are_left_out_and_told(told: list[object], caplog: pytest.LogCaptureFixture) -> None:
    """They would make the statefile invalid, and the arbiter would write it anew every two seconds (seen)."""
    with caplog.at_level(logging.WARNING):
        assert _endpoints(KEY, {"endpoints": told}, "2a") == (OWN,)
    assert "left out" in caplog.text


def test_what_is_no_list_names_no_endpoint() -> None:
    assert _endpoints(KEY, {"endpoints": OWN}, "2a") == ()
