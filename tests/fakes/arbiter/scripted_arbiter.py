"""The arbiter as the command line sees it: `ask_arbiter` answering from a script, and `main` as a shell calls it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from dynamo_local.cli import main, planner, status, waiting
from dynamo_local.cli import waiting as asking
from dynamo_local.cli.common import ArbiterRefused
from dynamo_local.errors import NotRunning
from tests.tools.answers import name_of, read_answer

OF_THE_ARBITER = {
    *("apply", "drain", "flip", "planner", "planner.plugins", "restart", "scale", "scale.flip", "sleep", "status"),
    *("top", "wake"),
}
"""Answers that a script has made up here. Tests of real graphs check them."""

Rows = Sequence[dict[str, Any]]


class ScriptedArbiter:
    """`reply` answers commands; each look at the status takes the next of `looks`, and the last one stays.

    None among `looks` is an arbiter that has gone.
    """

    def __init__(self, reply: dict[str, Any] | None = None, looks: Sequence[Rows | None] = ([],)) -> None:
        self.reply = reply or {}
        self.looks = list(looks)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, _paths: Any, command: str, timeout_s: float = 5.0, **properties: Any) -> dict[str, Any]:
        """As `ask_arbiter`."""
        if command == "dynamo_status":
            rows = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
            if rows is None:
                raise NotRunning("nothing runs in namespace 'dynamo'")
            return {"graph": {"workers": rows}}
        self.asked.append((command, properties))
        answer = {"id": "1", "status": "ok", "time": 1.0, **self.reply}
        if answer["status"] != "ok":
            raise ArbiterRefused(answer)
        return answer

    def install(self, monkeypatch: pytest.MonkeyPatch) -> ScriptedArbiter:
        """Take the arbiter's place in the command line; nobody sleeps between two looks."""
        for module in (asking, planner, waiting, status):
            monkeypatch.setattr(module, "ask_arbiter", self.ask)
        monkeypatch.setattr(waiting, "POLL_S", 0.0)
        return self


def dynamo(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """`dynamo WORDS…`: the exit code; what it wrote is in capsys. The answer of `--json` must be as its schema says."""
    monkeypatch.setattr(sys, "argv", ["dynamo", *words])
    # A script, as `dynamo` is one: by this Click would find `python -m pytest`, and call the program that.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None, raising=False)
    checks = "--json" in words and name_of(words) not in OF_THE_ARBITER
    kept = contextlib.redirect_stdout(io.StringIO()) if checks else contextlib.nullcontext()
    with kept as written, pytest.raises(SystemExit) as exited:
        main.main()
    if written is not None:
        sys.stdout.write(written.getvalue())
        if written.getvalue():
            read_answer(words, written.getvalue())
    return int(exited.value.code or 0)
