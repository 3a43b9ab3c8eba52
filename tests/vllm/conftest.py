"""The tiny model, and the rule that in `tox -e vllm` a skip is a failure (DYN_VLLM_REQUIRED)."""

from __future__ import annotations

import pytest

from dynamo_local.engines.vllm.checks import is_installed
from tests.drivers.served import ROOT
from tests.tools.required import fail_where_skipped
from tests.vllm.cases import answers
from tests.vllm.hosts import VllmHost, cpu_host

__all__ = ["answers"]

REQUIRED = "DYN_VLLM_REQUIRED"


@pytest.fixture(scope="session")
def vllm_host(tmp_path_factory: pytest.TempPathFactory) -> VllmHost:
    """vLLM's CPU build and a model made on the spot from the words of our own pages."""
    if not is_installed():
        pytest.skip("vLLM is not installed here; tox -e vllm installs its CPU build")
    from tests.vllm.make_tiny_model import make

    return cpu_host(make(tmp_path_factory.mktemp("model") / "tiny", sorted((ROOT / "docs").glob("*.md"))))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    fail_where_skipped(session, exitstatus, REQUIRED)
