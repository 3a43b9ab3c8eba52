"""Broken graphs and configurations through the command line: one line, exit code 2, nothing started, no file left.

`tests/unit/config/test_bad_inputs.py` tries every one of them in one process; here each takes a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT
from tests.drivers.served import Served
from tests.tools.bad_inputs import BAD_INPUTS, TARGET, BadInput

pytestmark = pytest.mark.infra

SIM = ("--gpus", "sim:8")
HOST = (
    BadInput("gpus_sim_of_none", r"sim:0", args=(TARGET, "--gpus", "sim:0")),
    BadInput("gpus_nonsense", r"'seven'", args=(TARGET, "--gpus", "seven")),
    BadInput("gpus_too_few", r"VllmWorker.*per worker", args=(TARGET, "--gpus", "sim:1")),
    BadInput("lease_ttl", r"DYN_LEASE_TTL_S='soon'", args=(TARGET, *SIM), env={"DYN_LEASE_TTL_S": "soon"}),
    BadInput(
        "cuda_of_a_service",
        r"CUDA_VISIBLE_DEVICES.*DYN_DISABLE_AUTO_GPU_ALLOCATION=1",
        args=(TARGET, *SIM, "--VllmWorker.ServiceArgs.envs.CUDA_VISIBLE_DEVICES=0"),
    ),
    BadInput("no_driver", "sim:"),
)
"""Only the command line refuses these."""
CASES = [
    *((bad, ()) for bad in (*BAD_INPUTS[::40], *HOST)),
    *((bad, ("--detach",)) for bad in (*BAD_INPUTS[::60], HOST[0])),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Folders, in which nothing is ever started."""
    with Served() as made:
        yield made


@pytest.mark.parametrize(("bad", "words"), CASES, ids=lambda value: getattr(value, "id", "detached" if value else ""))
def test_bad_input_costs_one_line_and_exit_code_2(
    bad: BadInput, words: tuple[str, ...], served: Served, tmp_path: Path
) -> None:
    if bad.id == "no_driver" and Path("/proc/driver/nvidia").exists():
        pytest.skip("this host has an NVIDIA driver")
    namespace = f"bad-{bad.id.replace('_', '-')}-{len(words)}"  # what is left behind can be told apart
    bad.write(tmp_path)
    served.cwd = tmp_path
    own = () if "--namespace" in bad.args else ("--namespace", namespace)
    done = served.cli("serve", *bad.args, *own, *words, env={**served.env, **bad.env})
    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("dynamo: ")
    assert re.search(bad.expect, done.stderr), done.stderr
    assert not (served.paths.runtime.parent / namespace).exists()
    assert not (served.paths.statefile.parent / f"{namespace}.json").exists()
    assert [line for _, line in served.processes() if f"--namespace {namespace} " in f"{line} "] == []


def test_one_process_is_detached_although_d_stands_within_another_word(served: Served, tmp_path: Path) -> None:
    served.cwd = tmp_path
    done = served.cli("serve", "no_such_module:Frontend", "-dn", "short-options", timeout_s=60)
    assert done.returncode == EXIT_BAD_INPUT, done
    assert "no_such_module" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
