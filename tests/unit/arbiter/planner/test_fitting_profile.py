"""A planner refuses a profile that was measured of other engines than those that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.planner_options import changed_options
from dynamo_local.arbiter.profile_check import check_profile, with_nearest
from dynamo_local.components.engine_facts import engine_description, engine_version, engines_of
from dynamo_local.components.targets import times_of
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import GraphSpec, Missing, Resources, Role, ServiceSpec
from dynamo_local.errors import ConfigError
from dynamo_local.profile.document import Document, EngineFacts, GpuFacts, write_document
from dynamo_local.profile.reading import DEFAULT_PROFILE, read_profile
from tests.fakes.profile_documents import document
from tests.fakes.profile_folders import write_npz


def graph(**config: Any) -> GraphSpec:
    """Aggregated, with one worker."""
    worker = ServiceSpec("VllmWorker", Role.DECODE, resources=Resources(gpu=1), config=config)
    return GraphSpec("dynamo", "graph:Frontend", (worker,))


def of(spec: GraphSpec) -> Document:
    """A document that says that just these engines were measured."""
    engines = {
        role: EngineFacts(
            component="VllmWorker",
            version=engine_version(each["engine"]),
            max_kv_tokens=1,
            context_length=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            **each,
        )
        for role, each in engines_of(spec).items()
    }
    return document(engines=engines, versions={"sim": engine_version("sim")}, gpus=[GpuFacts("H200", "GPU-0")])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A profile of `graph(sim={"speed": 10})` on an H200."""
    write_npz(tmp_path)
    write_document(tmp_path, of(graph(sim={"speed": 10})))
    return tmp_path


def config(folder: Path, **more: Any) -> PlannerConfig:
    """A planner that goes by it."""
    return planner_section("Planner", {"policy": "slo", "profile_results_dir": str(folder), **more})


def test_the_engines_that_were_measured_are_taken(folder):
    """Whatever else stands in their section: targets and thresholds change no pass."""
    here = graph(sim={"speed": 10.0}, ttft=500.0, **{"max-local-prefill-length": 3})
    check_profile(config(folder), here, ["H200"])


def test_a_default_that_was_written_out_is_no_difference(tmp_path, monkeypatch):
    write_npz(tmp_path)
    write_document(tmp_path, of(graph(sim={"speed": 1.0, "max-num-seqs": 256})))
    check_profile(config(tmp_path), graph())
    monkeypatch.setattr("dynamo_local.engines.vllm.checks.is_installed", lambda: True)
    monkeypatch.setattr("dynamo_local.engines.vllm.checks.defaults", lambda: {"block_size": 16, "seed": 0})
    measured, here = ({"engine": "vllm", "model": "/m", **more} for more in ({"block-size": 16}, {"seed": 0}))
    write_document(tmp_path, of(graph(**measured)))
    check_profile(config(tmp_path), graph(**here), patient=True)
    with pytest.raises(ConfigError, match=r"agg: block_size is not set here and was 16\.0; agg: seed is 0\.0 here"):
        check_profile(config(tmp_path), graph(**here))


@pytest.mark.parametrize(
    ("here", "gpus", "said"),
    [
        (graph(sim={"speed": 1}), None, "agg: sim.speed is 1.0 here and was 10.0"),
        (graph(), None, "agg: sim.speed is 1.0 here and was 10.0"),
        (graph(sim={"speed": 10}), ["H100"], "GPUs are H100 here and were H200"),
        (graph(engine="vllm", model="/m"), None, "agg: engine is vllm here and was sim"),
    ],
)
def test_other_engines_are_refused_with_what_differs(folder, here, gpus, said):
    with pytest.raises(ConfigError, match="profile-anyway") as refused:
        check_profile(config(folder), here, gpus)
    assert said in str(refused.value)
    check_profile(config(folder, profile_anyway=True), here, gpus)


def test_profiles_that_say_nothing_of_their_engines_are_taken(tmp_path):
    """Dynamo's own folders, the ones that ship, and none at all."""
    write_npz(tmp_path)
    check_profile(config(tmp_path), graph())
    check_profile(planner_section("Planner", {"policy": "slo"}), graph())
    check_profile(planner_section("Planner", {"policy": "load"}), graph())


def test_a_running_planner_does_not_take_it_either(folder):
    """`dynamo planner start --profile-results-dir DIR` is refused as a whole."""
    before = planner_section("Planner", {"policy": "throughput-load", "optimization_target": "sla"})
    given = {"profile_results_dir": str(folder)}
    with pytest.raises(ConfigError, match="measured of something else"):
        changed_options(before, given, graph(sim={"speed": 2}))
    assert changed_options(before, given, graph(sim={"speed": 10})).profile_results_dir == folder
    assert changed_options(before, {**given, "profile_anyway": True}, graph()).profile_anyway


def test_a_profile_that_cannot_be_read_is_refused_with_its_file(folder):
    (folder / "profile.json").write_text("{")
    with pytest.raises(ConfigError, match=r"profile\.json"):
        check_profile(config(folder), graph())


def test_a_measured_profile_has_the_engines_speed_in_it(folder, tmp_path_factory):
    """Requests are dispatched by its times as they are; those of another profile are divided by the engine's speed."""
    other = write_npz(tmp_path_factory.mktemp("dynamos"))
    assert times_of(str(folder), {"speed": 10}).speed == 1.0
    assert times_of(other, {"speed": 10}).speed == 10.0


def test_a_profile_of_a_command_fits_that_command_alone(tmp_path):

    def server(command: object) -> GraphSpec:
        section = {"command": command, "runtime": "http"}
        worker = ServiceSpec("Vllm", Role.AGGREGATED, resources=Resources(gpu=1), config=section, runtime="http")
        return GraphSpec("dynamo", "file.yaml", (worker,))

    write_npz(tmp_path)
    write_document(tmp_path, of(server("vllm serve m --max-num-seqs 8")))
    check_profile(config(tmp_path), server(["vllm", "serve", "m", "--max-num-seqs", 8]))
    with pytest.raises(ConfigError, match="agg: command is vllm serve m here and was vllm serve m --max-num-seqs 8"):
        check_profile(config(tmp_path), server("vllm serve m"))


def test_numbers_and_spellings_do_not_make_another_engine():
    one = graph(sim={"speed": 10, "max-num-seqs": 8}).services[0]
    two = graph(sim={"speed": 10.0, "max_num_seqs": 8.0}).services[0]
    assert engine_description(one) == engine_description(two)


@pytest.mark.parametrize(
    ("gpu", "memory_bytes", "name"),
    [
        ("NVIDIA H200", 141e9, DEFAULT_PROFILE),
        ("NVIDIA H100 80GB HBM3", 80e9, "Qwen3-8B_h100_sxm_vllm_tp1"),
        ("NVIDIA L4", 24e9, "Qwen3-8B_h100_sxm_vllm_tp1"),
        ("NVIDIA B200", 183e9, DEFAULT_PROFILE),
        ("unknown", None, DEFAULT_PROFILE),
    ],
)
def test_without_a_profile_slo_begins_with_the_shipped_one_nearest_to_the_gpus(gpu, memory_bytes, name):
    """By its name, else by its memory; what is given stays, and other policies get none."""
    devices = [GpuDevice(0, "GPU-0", gpu, Missing("no") if memory_bytes is None else int(memory_bytes), 0)]
    found = with_nearest(PlannerConfig(policy="slo"), graph(), devices)
    assert str(found.profile_results_dir) == name
    assert read_profile(name)
    given = PlannerConfig(policy="slo", profile_results_dir="/mine")
    assert with_nearest(given, graph(), devices) == given
    assert with_nearest(PlannerConfig(), graph(), devices) == PlannerConfig()


def test_simulated_engines_are_begun_with_the_profile_that_they_play():
    devices = [GpuDevice(0, "GPU-0", "Simulated GPU 80GB", 80 * 2**30, 0)]
    assert str(with_nearest(PlannerConfig(policy="slo"), graph(), devices).profile_results_dir) == DEFAULT_PROFILE
    played = ServiceSpec("VllmWorker", Role.DECODE, config={"sim": {"profile": "Qwen3-8B_h100_sxm_vllm_tp1"}})
    sim = GraphSpec("dynamo", "graphs.disagg:Frontend", (played,))
    found = with_nearest(PlannerConfig(policy="slo"), sim, devices)
    assert str(found.profile_results_dir) == "Qwen3-8B_h100_sxm_vllm_tp1"
