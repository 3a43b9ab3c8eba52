"""Targets in sections: what is the default with and without them, and what is said where there is no profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.request import Request, ServeOptions, understand
from dynamo_local.components.processor import ProcessorConfig
from dynamo_local.components.router import RouterConfig
from dynamo_local.components.targets import with_targets
from dynamo_local.components.vllm_worker import VllmWorkerConfig
from dynamo_local.config.loading import load_config
from dynamo_local.core.routing.estimates import Targets, Timing
from dynamo_local.core.types import Missing
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import load_graph
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
    engines = ("--VllmWorker.engine=sim", "--PrefillWorker.engine=sim", '--VllmWorker.common-configs=["model"]')
    real = (f"--Common.model={tmp_path}", *engines, "--Processor.ttft=2000")
    assert any(note.startswith("Processor: router slo picks as least-loaded") for note in notes(tmp_path, *real))
    assert notes(tmp_path, *real, "--Processor.profile-results-dir=dynamo_H200_TP1P_TP1D") == ()
    assert notes(tmp_path, "--Processor.ttft=2000", "--VllmWorker.itl=50") == ()


def test_a_profile_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"VllmWorker: .*nowhere"):
        notes(tmp_path, "--VllmWorker.ttft=2000", "--VllmWorker.profile-results-dir=/nowhere")


def served(tmp_path: Path, *overrides: str, graph: str = "graphs.disagg_router", **options: Any) -> Request:
    """The deployment of an example with its Router, checked."""
    given = ServeOptions(f"{graph}:Frontend", overrides=("--VllmWorker.remote-prefill=true", *overrides), **options)
    with clean_imports():
        environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
        return understand(given, environ, EXAMPLE, only_plan=True)


def targets_of(request: Request) -> dict[str, tuple[float | None, float | None]]:
    sections = {name: request.config.service(name) for name in ("Frontend", "Processor", "Router", "VllmWorker")}
    found = {name: (section.get("ttft"), section.get("itl")) for name, section in sections.items()}
    return {**found, "Planner": (request.planner.ttft_ms, request.planner.itl_ms)}


EVERYBODY = {name: (300, 20) for name in ("Frontend", "Processor", "Router", "VllmWorker", "Planner")}


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (("--Planner.ttft=300", "--Planner.itl=20"), {}),
        (("--Planner.ttft-ms=300", "--Common.itl=20"), {}),
        (("--Common.ttft=300", "--Common.itl=20"), {}),
        (("--Planner.policy=slo",), {"ttft_ms": 300, "itl_ms": 20}),
        (("--Common.ttft=300", "--Planner.ttft=300"), {"ttft_ms": 300.0, "itl_ms": 20}),
    ],
)
def test_targets_that_are_said_once_hold_for_everybody(
    tmp_path: Path, overrides: tuple[str, ...], options: dict[str, float]
) -> None:
    request = served(tmp_path, *overrides, **options)
    assert targets_of(request) == EVERYBODY
    assert request.planner.policy == "slo"
    worker = VllmWorkerConfig(**request.config.service("VllmWorker"))
    assert worker.wants_slo
    assert ProcessorConfig(**request.config.service("Processor")).policy == "slo"


def test_the_services_keep_what_the_planner_aims_at_by_default(tmp_path: Path) -> None:
    found = targets_of(served(tmp_path, "--Planner.ttft=300"))
    assert found == {name: (300, 50) for name in found}


@pytest.mark.parametrize(
    ("overrides", "ttft_ms", "words"),
    [
        (("--Planner.ttft=300", "--Common.ttft=200"), None, "Planner.ttft is 300, and Common.ttft is 200"),
        (("--Planner.ttft=300",), 200.0, "--ttft is 200.0, and Planner.ttft is 300"),
        (("--Planner.itl=20", "--VllmWorker.itl=10"), None, "Planner.itl is 20, and VllmWorker.itl is 10"),
    ],
)
def test_a_target_with_two_values_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], ttft_ms: float | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        served(tmp_path, *overrides, ttft_ms=ttft_ms)


def test_the_former_dispatch_is_had_by_its_name(tmp_path: Path) -> None:
    former = ("--VllmWorker.disagg-policy=threshold", "--Processor.router=least-loaded")
    config = served(tmp_path, "--Planner.ttft=300", *former).config
    assert not VllmWorkerConfig(**config.service("VllmWorker")).wants_slo
    assert ProcessorConfig(**config.service("Processor")).policy == "least-loaded"


def test_a_target_of_one_service_is_its_own(tmp_path: Path) -> None:
    request = served(tmp_path, "--VllmWorker.ttft=300")
    assert targets_of(request)["Processor"] == (None, None)
    assert request.planner.policy == "load"


def test_a_planner_with_thresholds_stays_one_beside_common_targets(tmp_path: Path) -> None:
    assert served(tmp_path, "--Common.ttft=300", "--Planner.adjustment-interval=10").planner.policy == "load"
    assert served(tmp_path, "--Common.ttft=300", "--Planner.policy=load").planner.policy == "load"
    assert served(tmp_path, "--Common.ttft=300", "--Planner.policy=sla").planner.ttft_ms == 300


def test_an_aggregated_graph_with_targets_is_planned_by_them(tmp_path: Path) -> None:
    aggregated = served(tmp_path, "--Common.ttft=300", "--Planner.max-gpu-budget=4", graph="graphs.agg_router")
    assert (aggregated.planner.policy, aggregated.planner.ttft_ms) == ("slo", 300)


def test_processor_and_router_estimate_by_the_workers_engine(tmp_path: Path) -> None:
    config = served(tmp_path, "--Planner.ttft=300", '--VllmWorker.sim={"speed": 4}').config
    assert config.service("Processor")["sim"] == config.service("Router")["sim"] == {"speed": 4}


def test_a_worker_of_vllm_dispatches_by_the_planners_profile(tmp_path: Path) -> None:
    named = ("--Common.model=/models/x", "--Planner.profile-results-dir=dynamo_H200_TP1P_TP1D", "--Planner.ttft=300")
    with clean_imports():
        graph = load_graph("graphs.disagg_router:Frontend", base_dir=EXAMPLE)
        lists = [f'--{name}.common-configs=["model"]' for name in ("Processor", "Router", "VllmWorker")]
        config = with_targets(graph, load_config(None, env={}, overrides=(*named, *lists)), {})
    found = {config.service(name).get("profile_results_dir") for name in ("Processor", "Router", "VllmWorker")}
    assert found == {"dynamo_H200_TP1P_TP1D"}


def test_a_damaged_profile_of_the_sim_engine_is_no_plan(tmp_path: Path) -> None:
    folder = tmp_path / "selected_decode_interpolation"
    folder.mkdir()
    (folder / "raw_data.npz").write_bytes(b"PK nothing")
    with pytest.raises(ConfigError, match="the profile in") as raised:
        notes(tmp_path, f"--VllmWorker.sim.profile={tmp_path}", "--VllmWorker.disagg-policy=threshold")
    assert str(tmp_path) in str(raised.value)
