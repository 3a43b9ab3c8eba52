"""Broken graphs and configurations through the command line: one line, exit code 2, nothing started, no file left."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT
from tests.drivers.served import COMMAND_TIMEOUT_S, Served
from tests.tools.bad_inputs import BAD_INPUTS, TARGET, BadInput

pytestmark = pytest.mark.infra

DETACHED = BAD_INPUTS[::60]
"""A sample: `--detach` has a way of its own to tell."""

SIM = ("--gpus", "sim:8")

GPUS = (
    BadInput("gpus_sim_of_none", r"sim:0", args=(TARGET, "--gpus", "sim:0")),
    BadInput("gpus_nonsense", r"'seven'", args=(TARGET, "--gpus", "seven")),
    BadInput("gpus_too_few", r"VllmWorker.*per worker", args=(TARGET, "--gpus", "sim:1")),
    BadInput("lease_ttl", r"DYN_LEASE_TTL_S='soon'", args=(TARGET, *SIM), env={"DYN_LEASE_TTL_S": "soon"}),
    BadInput(
        "cuda_of_a_service",
        r"CUDA_VISIBLE_DEVICES.*DYN_DISABLE_AUTO_GPU_ALLOCATION=1",
        args=(TARGET, *SIM, "--VllmWorker.ServiceArgs.envs.CUDA_VISIBLE_DEVICES=0"),
    ),
)
"""What only the command line refuses."""

CASES = {
    f"{bad.id}{suffix}": (bad, words)
    for suffix, words, bads in (("", (), (*BAD_INPUTS, *GPUS)), ("-detached", ("--detach",), (*DETACHED, *GPUS[:1])))
    for bad in bads
}


ONE_IN = 40
"""Of the plain cases, how many run each time; `tests/unit/config/test_bad_inputs.py` tries all, in one process."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as made:
        yield made


def _left(served: Served, namespace: str) -> list[str]:
    runtime, state = served.paths.runtime.parent / namespace, served.paths.statefile.parent / f"{namespace}.json"
    found = [str(path) for path in (runtime, state) if path.exists()]
    return found + [line for _, line in served.processes() if f"--namespace {namespace} " in f"{line} "]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if words or bad in GPUS[1:3] or number % ONE_IN == 0 else pytest.mark.full)
        for number, (case, (bad, words)) in enumerate(CASES.items())
    ],
)
def test_bad_input_costs_one_line_and_exit_code_2(case: str, served: Served, tmp_path: Path) -> None:
    bad, words = CASES[case]
    namespace = f"bad-{list(CASES).index(case)}"
    bad.write(tmp_path)
    # A namespace of its own, where the case says none: what is left behind can be told apart.
    own = () if "--namespace" in bad.args else ("--namespace", namespace)
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_local.cli.main", "serve", *bad.args, *own, *words],
        cwd=tmp_path,
        env={**served.env, **bad.env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )

    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("dynamo: ")
    assert re.search(bad.expect, done.stderr), done.stderr
    assert _left(served, namespace) == []


def test_without_a_driver_the_error_names_the_simulation(tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this host has an NVIDIA driver")
    bad = BadInput("no_driver", "")
    bad.write(tmp_path)
    with Served() as served:
        done = subprocess.run(
            [sys.executable, "-m", "dynamo_local.cli.main", "serve", TARGET],
            cwd=tmp_path,
            env=served.env,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    assert done.returncode == EXIT_BAD_INPUT
    assert "sim:" in done.stderr
    assert len(done.stderr.splitlines()) == 1
