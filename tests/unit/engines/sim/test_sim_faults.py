"""A simulated GPU with which something is wrong: how much longer its passes take, and when."""

from __future__ import annotations

import pytest

from dynamo_local.core.gpus import simulated_uuid
from dynamo_local.engines.sim.options import Faults, SimOptions, faults_here
from dynamo_local.engines.sim.requests import SchedulerConfig
from dynamo_local.errors import ConfigError


def test_an_engine_with_which_nothing_is_wrong_has_no_faults() -> None:
    assert faults_here(SimOptions(), 0.0, {"CUDA_VISIBLE_DEVICES": simulated_uuid(0)}) is None


@pytest.mark.parametrize(("gpus", "factor"), [((1,), 1.3), ((0, 1), 1.3), ((2,), None), ((), None)])
def test_a_slow_gpu_slows_down_whoever_has_it(gpus: tuple[int, ...], factor: float | None) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(map(simulated_uuid, gpus))}
    faults = faults_here(SimOptions(slow_gpu=1, slow_factor=1.3), 0.0, environ)
    assert (None if faults is None else faults.factor(100.0)) == factor


def test_a_neighbour_comes_and_goes() -> None:
    faults = Faults(began_s=10.0, neighbour_every_s=2.0, neighbour_for_s=0.5, neighbour_factor=3.0)
    assert [faults.factor(10.0 + s) for s in (0.0, 0.4, 0.6, 1.9, 2.1, 4.6)] == [3.0, 3.0, 1.0, 1.0, 3.0, 1.0]


def test_an_engine_drifts_from_its_start_on() -> None:
    faults = Faults(began_s=5.0, slow=2.0, drift_per_s=0.01)
    assert [faults.factor(at_s) for at_s in (0.0, 5.0, 15.0)] == [2.0, 2.0, pytest.approx(2.2)]


def test_the_scheduler_divides_by_what_is_left_of_its_speed() -> None:
    faults = Faults(began_s=0.0, slow=2.0)
    assert SchedulerConfig(num_gpu_blocks=10, speed=10.0, faults=faults).speed_at(1.0) == 5.0
    assert SchedulerConfig(num_gpu_blocks=10, speed=10.0).speed_at(1.0) == 10.0


@pytest.mark.parametrize("wrong", [{"slow_gpu": -1}, {"slow_factor": 0.0}, {"drift_per_s": -0.1}])
def test_wrong_values_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SimOptions(**wrong)  # type: ignore[arg-type]
