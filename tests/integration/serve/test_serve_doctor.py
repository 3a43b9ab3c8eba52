"""`dynamo doctor` beside a real run: nothing to find, then a killed arbiter, then a lost statefile and its repair."""

from __future__ import annotations

import json
import shlex
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.drivers.served import Served

pytestmark = pytest.mark.infra

WITH_PAGES = """
Pages:
  command: python -m http.server {port:http} --bind 127.0.0.1
  role: frontend
  health-url: http://127.0.0.1:{port:http}/
"""
OF_RUNS = ("port", "statefile", "namespace-dead", "namespace-kept", "namespace-silent", "orphans", "runtime-leftovers")


def findings(served: Served, port: int | None) -> list[dict[str, Any]]:
    """Those of this run alone: the command sees the orphans of other tests as well."""
    report = json.loads(served.cli("doctor", "--json", "--port", str(port)).stdout)
    return [
        each
        for each in report["findings"]
        if each["id"] in OF_RUNS and (each["id"] != "orphans" or str(served.folder) in each["repair"])
    ]


@pytest.mark.full
def test_a_run_is_in_order_and_what_is_left_of_it_is_found() -> None:
    with Served(
        "--on-arbiter-death", "keep", target=("-f", "graph.yaml"), files={"graph.yaml": WITH_PAGES}, frontend=False
    ).started() as served:
        port = urlsplit(served.url).port

        def faults() -> set[str]:
            return {each["id"] for each in findings(served, port) if each["verdict"] != "ok"}

        assert faults() == set()
        assert "your own graph listens" in next(each["evidence"] for each in findings(served, port))
        served.kill_arbiter()
        assert faults() == {"namespace-kept"}
        served.paths.statefile.unlink()
        assert faults() == {"orphans"}
        repair = next(each["repair"] for each in findings(served, port) if each["id"] == "orphans")
        variable, program, *words = shlex.split(repair)
        assert (variable, program) == (f"DYN_LOCAL_STATE_DIR={served.paths.statefile.parent}", "dynamo")
        served.ok(*words)
        assert faults() == set()
