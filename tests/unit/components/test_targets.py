"""Targets in sections: what is the default with and without them, and what is said where there is no profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.arbiter.request import ServeOptions, understand
from dynamo_local.components.processor import ProcessorConfig
from dynamo_local.components.router import RouterConfig
from dynamo_local.components.vllm_worker import VllmWorkerConfig
from dynamo_local.core.routing.estimates import Targets, Timing
from dynamo_local.core.types import Missing
from dynamo_local.errors import ConfigError
from tests.tools.clean_imports import clean_imports

EXAMPLE = Path(__file__).parents[3] / "examples" / "llm"
NO_PROFILE = "no profile-results-dir is given"


def notes(tmp_path: Path, *overrides: str) -> tuple[str, ...]:
    """Those of `dynamo serve --dry-run`."""
    options = ServeOptions("graphs.disagg:Frontend", file=EXAMPLE / "configs/disagg.yaml", overrides=overrides)
    with clean_imports():
        environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
        return understand(options, environ, EXAMPLE, only_plan=True).notes


@pytest.mark.parametrize("config", [ProcessorConfig, RouterConfig])
def test_a_target_makes_slo_the_default_router(config: type[ProcessorConfig | RouterConfig]) -> None:
    assert config().policy == "least-loaded"
    assert config(ttft=2000).policy == config(itl=50).policy == "slo"
    assert config(ttft=2000, router="least-loaded").policy == "least-loaded"
    assert config(router="slo").policy == "slo"


def test_a_target_makes_slo_the_default_of_prefills() -> None:
    assert not VllmWorkerConfig(remote_prefill=True).wants_slo
    assert VllmWorkerConfig(remote_prefill=True, itl=50).wants_slo
    assert not VllmWorkerConfig(remote_prefill=True, itl=50, disagg_policy="threshold").wants_slo
    assert not VllmWorkerConfig(itl=50).wants_slo
    assert VllmWorkerConfig(itl=50, ttft=2000).targets == Targets(2.0, 0.05)


def test_the_sim_engines_profile_and_speed_are_taken() -> None:
    fast, slow = VllmWorkerConfig().timing(), VllmWorkerConfig(sim={"speed": 0.1}).timing()
    assert isinstance(fast, Timing)
    assert isinstance(slow, Timing)
    assert slow.prefill_s(3000) == pytest.approx(10 * fast.prefill_s(3000))


def test_another_engine_has_no_profile_until_one_is_named() -> None:
    assert isinstance(VllmWorkerConfig(model="/m", remote_prefill=True, itl=50).timing(), Missing)
    assert NO_PROFILE in (VllmWorkerConfig(model="/m", remote_prefill=True, itl=50).what_slo_lacks() or "")
    assert NO_PROFILE in (ProcessorConfig(model="/m", itl=50).what_slo_lacks() or "")
    named = VllmWorkerConfig(model="/m", remote_prefill=True, itl=50, profile_results_dir="dynamo_H200_TP1P_TP1D")
    assert named.what_slo_lacks() is None
    assert ProcessorConfig(model="/m", router="least-loaded").what_slo_lacks() is None


def test_dry_run_says_who_cannot_decide_by_targets(tmp_path: Path) -> None:
    real = ("--Common.model=/m", "--VllmWorker.engine=sim", "--PrefillWorker.engine=sim", "--Processor.ttft=2000")
    assert any(note.startswith("Processor: router slo picks as least-loaded") for note in notes(tmp_path, *real))
    assert notes(tmp_path, *real, "--Processor.profile-results-dir=dynamo_H200_TP1P_TP1D") == ()
    assert notes(tmp_path, "--Processor.ttft=2000", "--VllmWorker.itl=50") == ()


def test_a_profile_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"VllmWorker: .*nowhere"):
        notes(tmp_path, "--VllmWorker.ttft=2000", "--VllmWorker.profile-results-dir=/nowhere")
