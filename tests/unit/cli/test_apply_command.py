"""`dynamo apply` as it is typed: what it prints, when it is done, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_local.cli import apply
from dynamo_local.errors import EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK, EXIT_TIMED_OUT, BadInput, NotRunning
from tests.fakes.arbiter.scripted_arbiter import dynamo
from tests.fakes.arbiter.supervisor import status_row

NAME = "dynamo_VllmWorker"
CAUSE = "apply:1f0c9a3e"
KEPT = {"Frontend.port": 18030}
KEPT_LINE = "kept from the command line: Frontend.port=18030 (--unset Frontend.port takes it back)"
SAID: dict[str, Any] = {
    "status": "ok",
    "dry_run": False,
    "changes": [{"what": "VllmWorker.sim.speed", "before": 1.0, "after": 2.0}],
    "notes": [],
    "components": {"VllmWorker": None},
    "removed": [],
    "workers": {"start": [], "leave": [], "renew": [NAME]},
    "stimulus_id": CAUSE,
}
UNDER_WAY = {"stimulus_id": CAUSE, "left": [NAME], "done": [], "substitutes": {NAME: f"{NAME}_1"}}


class Arbiter:
    """Answers `said`, then each look with the next of `graphs`; the last one stays. None is one that has gone."""

    def __init__(self, said: dict[str, Any], *graphs: dict[str, Any] | None) -> None:
        self.said = said
        self.graphs = list(graphs)
        self.sent: dict[str, Any] = {}

    def ask(self, _paths: Any, command: str, timeout_s: float = 5.0, **properties: Any) -> dict[str, Any]:
        if command == "dynamo_apply":
            self.sent = properties
            return self.said
        found = self.graphs.pop(0) if len(self.graphs) > 1 else self.graphs[0]
        if found is None:
            raise NotRunning("the arbiter has been killed")
        return {"graph": found}


def graph(*rows: dict[str, Any], changes: tuple[Any, ...] = (), notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """The status, as far as the command reads it."""
    planner = {"state": "stopped"}
    return {
        "workers": list(rows),
        "changes": list(changes),
        "notes": [{"text": text, "count": 1, "first_at": 0.0, "last_at": 0.0} for text in notes],
        "planner": planner,
    }


def worker(name: str = NAME, state: str = "ready", **more: Any) -> dict[str, Any]:
    return status_row(name, state, **{"outdated": False, **more})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(apply, "POLL_S", 0.0)
    monkeypatch.setattr(apply, "deployment_of", lambda paths, file, words, unset: ({"overrides": list(words)}, KEPT))

    def run(arbiter: Arbiter, *words: str) -> int:
        monkeypatch.setattr(apply, "ask_arbiter", arbiter.ask)
        return dynamo(monkeypatch, "apply", "-f", "x.yaml", "-n", "dynamo", *words)

    return run


def test_each_worker_is_told_of_until_all_is_done(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arbiter = Arbiter(
        SAID,
        graph(worker(outdated=True), worker(f"{NAME}_1", "starting"), changes=(UNDER_WAY,)),
        graph(worker(state="draining"), worker(f"{NAME}_1"), notes=("something happened",)),
        graph(worker(f"{NAME}_1")),
    )
    assert run(arbiter, "--VllmWorker.sim.speed=2") == EXIT_OK
    assert capsys.readouterr().out.splitlines() == [
        KEPT_LINE,
        "~ VllmWorker.sim.speed: 1.0 -> 2.0",
        f"{NAME} gets a new process",
        f"{NAME}: ready with its old configuration",
        f"{NAME}_1: starting, in the place of {NAME}",
        f"{NAME}: draining",
        f"{NAME}_1: ready",
        "something happened",
        f"{NAME}: gone",
    ]
    assert arbiter.sent == {
        "deployment": {"overrides": ["--VllmWorker.sim.speed=2"]},
        "dry_run": False,
        "force": False,
    }


def test_a_dry_run_is_not_waited_for(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [{"what": "A", "before": None, "after": "1 worker"}, {"what": "B.x", "before": [1], "after": None}]
    said = {**SAID, "dry_run": True, "changes": changes, "workers": {"start": ["dynamo_A"], "leave": [], "renew": []}}
    assert run(Arbiter({**said, "notes": ["the planner decides that"]}, None), "--dry-run") == EXIT_OK
    assert capsys.readouterr().out.splitlines() == [
        KEPT_LINE,
        "+ A: 1 worker",
        "- B.x: [1]",
        "dynamo_A starts",
        "the planner decides that",
    ]


def test_nothing_that_differs_is_said(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = {"start": [], "leave": [], "renew": []}
    assert run(Arbiter({**SAID, "changes": [], "workers": nobody}, None)) == EXIT_OK
    assert capsys.readouterr().out == f"{KEPT_LINE}\nnothing differs: nothing to do\n"


def test_what_an_earlier_apply_left_is_gone_on_with(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Arbiter({**SAID, "changes": []}, graph(worker()))) == EXIT_OK
    assert capsys.readouterr().out.splitlines() == [KEPT_LINE, f"{NAME} gets a new process", f"{NAME}: ready"]


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (graph(worker(state="faulted", pid=None, reason="5 failures")), "is faulted (5 failures); its log:"),
        (graph(worker(outdated=True)), "serves on with its old configuration"),
    ],
)
def test_a_configuration_that_does_not_start_is_a_failure(
    run: Any, capsys: pytest.CaptureFixture[str], last: dict[str, Any], told: str
) -> None:
    assert run(Arbiter(SAID, last)) == EXIT_FAILED
    assert f"dynamo: {NAME} {told}" in capsys.readouterr().err


def test_fewer_ready_workers_than_asked_for_are_a_failure(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Arbiter({**SAID, "components": {"VllmWorker": 2}}, graph(worker()))) == EXIT_FAILED
    assert "VllmWorker has 1 ready workers, not 2" in capsys.readouterr().err


def test_past_its_time_it_goes_on(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Arbiter(SAID, graph(worker(), changes=(UNDER_WAY,))), "--timeout", "0.01") == EXIT_TIMED_OUT
    assert "the arbiter goes on with it" in capsys.readouterr().err


def test_a_killed_arbiter_is_told_with_what_to_do(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Arbiter(SAID, graph(worker(), changes=(UNDER_WAY,)), None)) == EXIT_NOT_RUNNING
    assert "`dynamo serve … --adopt` with this file goes on with it" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert dynamo(monkeypatch, "apply", "-f", "none.yaml") == EXIT_NOT_RUNNING
    assert "nothing runs in namespace" in capsys.readouterr().err


# --- words of earlier command lines
SAID_BEFORE = {
    "Frontend": {"port": 18030, "served_model_name": "m"},
    "VllmWorker": {"sim": {"speed": 2.0}, "ServiceArgs": {"envs": {"HF_TOKEN": "****"}}},
}
SECRET = "VllmWorker.ServiceArgs.envs.HF_TOKEN"


def test_words_of_serve_stay_until_another_value_or_unset_takes_them_back() -> None:
    words = ("--Frontend.port=18031", f"--{SECRET}=x")
    kept = apply.kept_words(SAID_BEFORE, words, ("VllmWorker.sim",))
    assert kept == {**SAID_BEFORE, "VllmWorker": {"ServiceArgs": {"envs": {"HF_TOKEN": "****"}}}}
    in_file = {"Frontend": {"port": 8000, "served_model_name": "n"}}
    assert apply.kept_values(kept, in_file, words) == {"Frontend.served-model-name": "m"}
    assert apply.kept_values(kept, {"Frontend": {"served_model_name": "m"}}, words) == {}


@pytest.mark.parametrize(
    ("words", "unset", "told"),
    [
        ((), (), rf"{SECRET} was said .* not kept: say --{SECRET}=… again, or --unset {SECRET}"),
        (
            (),
            (SECRET, "Frontend.prot"),
            "no earlier command line said that; the run has .*did you mean 'Frontend.port'",
        ),
    ],
)
def test_a_secret_is_said_again_and_a_misspelt_unset_is_refused(
    words: tuple[str, ...], unset: tuple[str, ...], told: str
) -> None:
    with pytest.raises(BadInput, match=told):
        apply.kept_words(SAID_BEFORE, words, unset)
    assert apply.kept_words(SAID_BEFORE, (), (SECRET, "Frontend.served-model-name"))["Frontend"] == {"port": 18030}
