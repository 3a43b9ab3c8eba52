"""When nothing is adopted: an adoption that fails, a start beside live workers, a broken statefile."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_BUSY, EXIT_NOT_RUNNING
from dynamo_local.system.processes import is_alive
from tests.drivers.served import until
from tests.tools.alone import alone

pytestmark = pytest.mark.infra

KEEP = ("--on-arbiter-death", "keep")
PATIENCE_S = 15.0


@pytest.mark.full
def test_an_adoption_that_fails_leaves_everything_serving() -> None:
    with alone(*KEEP, name="Alone") as served:
        served.start()
        pids, guardian = served.pids(), served.status()["guardian_pid"]
        token = served.paths.runtime / "nats" / "token"
        served.kill_arbiter()

        other = served.cli(*served.serve_words("--adopt", "--detach", "--Alone.colour=red"))
        token.unlink()

        assert other.returncode == EXIT_BAD_INPUT
        assert "Alone.colour" in other.stderr
        assert [pid for pid in (guardian, *pids.values()) if not is_alive(pid)] == []
        served.adopt()
        assert served.pids() == pids
        assert token.exists()


@pytest.mark.full
def test_the_policy_stays_unless_said_otherwise() -> None:
    with alone(*KEEP, name="Alone") as served:
        served.start()
        served.kill_arbiter()
        served.adopt()
        assert served.status()["on_arbiter_death"] == "keep"
        served.kill_arbiter()
        served.adopt("--on-arbiter-death", "end")
        assert served.status()["on_arbiter_death"] == "end"
        served.kill_arbiter()

        until(lambda: served.leftovers() == [], PATIENCE_S, what=served.leftovers)

        nothing = served.cli(*served.serve_words("--adopt", "--detach"))
        assert nothing.returncode == EXIT_NOT_RUNNING


def test_serve_beside_live_workers_refuses_and_replace_ends_them() -> None:
    with alone(*KEEP, name="Alone") as served:
        served.start()
        pid, run_id = served.pids()["Alone"], served.status()["run_id"]
        served.kill_arbiter()

        refused = served.cli(*served.serve_words("--detach"))
        assert refused.returncode == EXIT_BUSY
        for way in ("--adopt", "--replace", "dynamo down"):
            assert way in refused.stderr
        assert is_alive(pid)

        replaced = served.cli(*served.serve_words("--detach", "--replace"))
        assert replaced.returncode == 0, replaced.stderr
        assert "what they stream is cut" in replaced.stdout
        assert f"ended: dynamo_Alone (pid {pid})" in replaced.stdout
        assert not is_alive(pid)
        assert served.status()["run_id"] != run_id
        assert len(served.pids_of("circus_plugins.guardian")) == 1


@pytest.mark.full
def test_a_statefile_that_somebody_broke_cannot_be_adopted_but_ended() -> None:
    with alone(*KEEP, name="Alone") as served:
        served.start()
        pid = served.pids()["Alone"]
        served.kill_arbiter(guardian=True)
        served.paths.statefile.write_text("{")

        adopted = served.cli(*served.serve_words("--adopt", "--detach"))
        plain = served.cli(*served.serve_words("--detach"))
        assert is_alive(pid)
        served.down()

        assert adopted.returncode != 0
        assert "not valid JSON" in adopted.stderr
        assert plain.returncode == EXIT_BUSY
        assert not is_alive(pid)
        aside = list(Path(served.paths.statefile.parent).glob("*.corrupt-*"))
        assert len(aside) == 1
