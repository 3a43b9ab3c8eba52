"""A stock `circusd` of a test's own: `circusd circus.ini`, as somebody who already runs circus has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from dynamo_local.system.processes import kill_session

ANSWER_TIMEOUT_S = 15.0


class StockCircusd:
    """`sections` is the ini's text after `[circus]`; `ask` sends one command, as circusctl does.

    With `ini` (and its `endpoint`) that file is used instead, from its own folder.
    """

    def __init__(
        self,
        folder: Path,
        sections: str = "",
        *,
        env: Mapping[str, str] | None = None,
        ini: Path | None = None,
        endpoint: str | None = None,
    ) -> None:
        self.folder = folder
        self.endpoint = endpoint or f"ipc://{folder}/circus.sock"
        self._ini = ini or folder / "circus.ini"
        if ini is None:
            self._ini.write_text(
                f"[circus]\ncheck_delay = 1\nendpoint = {self.endpoint}\n"
                f"pubsub_endpoint = ipc://{folder}/events.sock\n\n{sections}"
            )
        self._env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONWARNINGS": "ignore", **(env or {})}
        self._context = zmq.Context()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.folder / "circusd.log").read_text()

    def start(self) -> Self:
        with (self.folder / "circusd.log").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "circus.circusd", str(self._ini)],
                env=self._env,
                cwd=self._ini.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert self.ask("numwatchers")["status"] == "ok"
        return self

    def ask(self, command: str, **properties: Any) -> dict[str, Any]:
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.endpoint)
            socket.send(json.dumps({"id": "1", "command": command, "properties": properties}).encode())
            assert socket.poll(int(ANSWER_TIMEOUT_S * 1000)), f"no answer to {command!r}:\n{self.log}"
            reply: dict[str, Any] = json.loads(socket.recv())
            return reply

    def statuses(self) -> dict[str, str]:
        statuses: dict[str, str] = self.ask("status")["statuses"]
        return statuses

    def pids(self, watcher: str) -> list[int]:
        pids: list[int] = self.ask("list", name=watcher)["pids"]
        return pids

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def quit(self, timeout_s: float = 20.0) -> float:
        """`circusctl quit`; seconds until it is gone."""
        assert self._process is not None
        asked_s = time.monotonic()
        while self.ask("quit")["status"] != "ok":  # it is refused while circusd waits for another stop
            assert time.monotonic() - asked_s < timeout_s, "circusd refuses to quit"
            time.sleep(0.05)
        self._process.wait(timeout_s)
        return time.monotonic() - asked_s

    def __enter__(self) -> Self:
        return self.start()

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"--- circusd\n{self.log[-4000:]}")
        if not self.ended():
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            self.kill()
            for child in children:
                kill_session(int(child))
        self._context.term()
