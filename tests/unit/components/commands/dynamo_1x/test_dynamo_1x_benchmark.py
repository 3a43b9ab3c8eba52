"""Tests what a Dynamo worker says that it measured of itself."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.components.commands import dynamo_1x as module
from dynamo_local.components.commands.dynamo_1x import Benchmark, passes_in, python_of
from dynamo_local.core.types import Missing, Role
from dynamo_local.planner.pass_model import Kind, PassModel, begun_anew, decode_passes, prefill_passes
from dynamo_local.profile.reading import DEFAULT_PROFILE, read_profile
from dynamo_local.transport.fpm import SHORTEST_S
from dynamo_local.transport.observation import MAX_PASSES, Benchmarked
from tests.drivers.served import auntil
from tests.fakes.infra.etcd import FakeEtcd

PROFILE = read_profile(DEFAULT_PROFILE)
PREFILLS = prefill_passes(PROFILE.prefill.isl, PROFILE.prefill.ttft_ms)
DECODES = decode_passes(
    PROFILE.decode.kv_usage, PROFILE.decode.context_length, PROFILE.decode.itl_ms, PROFILE.decode.max_kv_tokens
)


def told() -> dict[str, Any]:
    """The profile's points, as if a worker had measured them."""
    results = []
    for kind, passes in (("prefill", PREFILLS), ("decode", DECODES)):
        for n, one in enumerate(passes):
            s = one.scheduled
            scheduled = {
                "num_prefill_requests": s.num_prefill_requests,
                "sum_prefill_tokens": s.sum_prefill_tokens,
                "num_decode_requests": s.num_decode_requests,
                "sum_decode_kv_tokens": s.sum_decode_kv_tokens,
            }
            fpm = {"version": 1, "worker_id": "w", "counter_id": n + 1, "wall_time": one.wall_time_s}
            results.append({"point": {"point_type": kind}, "fpms": [{**fpm, "scheduled_requests": scheduled}]})
    return {"status": "completed", "results": results}


def read(answer: Any, role: Role = Role.PREFILL) -> Benchmarked:
    return passes_in(json.dumps(answer).encode(), role, "42")


@pytest.mark.parametrize(
    ("role", "kind", "passes"),
    [
        (Role.PREFILL, Kind.PREFILL, PREFILLS),
        (Role.DECODE, Kind.DECODE, DECODES),
        (Role.AGGREGATED, Kind.AGG, PREFILLS + DECODES),
    ],
)
def test_a_benchmark_makes_the_model_that_a_profile_of_the_same_truth_makes(
    role: Role, kind: Kind, passes: tuple[Any, ...]
) -> None:
    found = read(told(), role)
    assert isinstance(found, tuple)
    assert len(found) == len(passes) <= MAX_PASSES
    assert {one.engine.worker_id for one in found} == {"42"}
    model, profiled = begun_anew(PassModel(kind), found), PassModel(kind).trained(passes, "profile")
    assert (model.ready, model.source) == (True, "worker")
    for load in ({"prefill_tokens": 3000}, {"decode_requests": 20, "decode_kv": 60_000}):
        assert model.pass_s(**load) == pytest.approx(profiled.pass_s(**load), abs=2 * SHORTEST_S, rel=1e-3)


def test_of_many_passes_some_are_told_from_first_to_last() -> None:
    answer = told()
    prefills = [one for one in answer["results"] if one["point"]["point_type"] == "prefill"]
    found = read({"results": prefills * 20})
    assert isinstance(found, tuple)
    assert len(found) == MAX_PASSES
    assert (found[0].counter_id, found[-1].counter_id) == (1, len(prefills))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "answers nothing that is known"),
        ([], "answers nothing that is known"),
        ({"status": "error", "message": "no benchmark data"}, "says: no benchmark data"),
        ({}, "tells no pass"),
        ({"results": 7}, "tells no pass"),
        ({"results": [7, {"point": 7}, {"point": {"point_type": "prefill"}, "fpms": [7, {"wall_time": "x"}]}]}, "no"),
        ({"results": [{"point": {"point_type": "prefill"}, "fpms": [{"wall_time": 0.0}]}]}, "tells no pass"),
        ({"results": [{"point": {"point_type": ["prefill"]}, "fpms": [{"wall_time": 1.0}]}]}, "tells no pass"),
        ({"results": [{"point": {"point_type": "prefill"}, "fpms": [{"dp_rank": 10**40}]}]}, "tells no pass"),
    ],
)
def test_what_is_no_benchmark_is_missing_with_the_reason(answer: Any, why: str) -> None:
    found = read(answer)
    assert isinstance(found, Missing)
    assert why in found.reason


def test_bytes_of_a_stranger_are_missing() -> None:
    for data in (b"", b"\xff", b"[" * 100_000, b"nan?"):
        assert isinstance(passes_in(data, Role.DECODE, "1"), Missing)


def test_the_python_of_a_command() -> None:
    assert python_of(("python", "-m", "dynamo.vllm")) == "python"
    assert python_of(("env", "A=1", "/opt/v/bin/python3.11", "-m", "dynamo.vllm")) == "/opt/v/bin/python3.11"
    assert python_of(("dynamo-worker", "--python")) is None


# --- asking ------------------------------------------------------------------------------------------


async def asked(etcd: FakeEtcd, argv: tuple[str, ...] = (sys.executable,)) -> Benchmarked:
    made = Benchmark(
        etcd,  # type: ignore[arg-type]
        "v1/instances/dynamo/backend/generate/2a",
        "dynamo.backend",
        Role.DECODE,
        argv,
        {"PATH": "/usr/bin"},
    )
    assert made.result() is None
    await auntil(lambda: made.result() is not None)
    found = made.result()
    await made.close()
    await etcd.close()
    assert found is not None
    return found


async def served() -> FakeEtcd:
    """A registry in which the worker has the endpoint."""
    etcd = FakeEtcd()
    await etcd.put("v1/instances/dynamo/backend/get_perf_metrics/2a", b"{}", await etcd.grant(60))
    return etcd


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """In place of Dynamo's client, which is asked for real in `tests/dynamo1x/measured/test_dynamo1x_benchmark.py`."""
    script = tmp_path / "asking.py"
    script.write_text(code)
    monkeypatch.setattr(module, "ASKING", script)


async def test_a_worker_without_the_endpoint_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 0.1)
    monkeypatch.setattr(module, "ASKING", Path("/nonexistent"))
    assert await asked(FakeEtcd()) == Missing("it has no endpoint get_perf_metrics")


async def test_a_command_without_a_python_cannot_be_asked() -> None:
    found = await asked(await served(), ("serve-it",))
    assert isinstance(found, Missing)
    assert "names no Python" in found.reason


async def test_the_client_asks_that_instance_and_its_answer_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(
        monkeypatch,
        tmp_path,
        "import sys\nassert sys.argv[1:] == ['dynamo.backend.get_perf_metrics', '42', 'etcd', 'tcp'], sys.argv\n"
        f"print({json.dumps(json.dumps(told()))})",
    )
    found = await asked(await served())
    assert isinstance(found, tuple)
    assert len(found) == len(DECODES)


async def test_a_client_that_fails_or_hangs_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, tmp_path, "import sys\nsys.exit('ImportError: no dynamo here')")
    found = await asked(await served())
    assert found == Missing("its get_perf_metrics could not be asked: ImportError: no dynamo here")
    stand_in(monkeypatch, tmp_path, "import time\ntime.sleep(600)")
    monkeypatch.setattr(module, "DEADLINE_S", 0.3)
    found = await asked(await served())
    assert isinstance(found, Missing)
    assert "has not answered within" in found.reason
    assert asyncio.all_tasks() == {asyncio.current_task()}
