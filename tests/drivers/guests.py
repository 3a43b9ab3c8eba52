"""A graph as a guest of a stock circusd: `with guest() as under: under.ready()`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dynamo_local.errors import NotRunning
from dynamo_local.system.liveness import is_held
from tests.drivers.served import EXAMPLE, Served, until
from tests.drivers.stock_circusd import StockCircusd

USE = "dynamo_local.circus_plugins.circusd_plugin.DynamoPlugin"
NOISY_ENV = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
READY_TIMEOUT_S = 40.0


class Guest:
    """The graph (`served`: its folders and commands) as a guest of `circusd`."""

    def __init__(self, served: Served, circusd: StockCircusd) -> None:
        self.served = served
        self.circusd = circusd

    def ready(self) -> Guest:
        until(self.is_ready, READY_TIMEOUT_S, what=self.logs)
        return self

    def is_ready(self) -> bool:
        try:
            return is_held(self.served.paths.lock) and self.served.status()["state"] == "ready"
        except NotRunning:
            return False

    def plugin_pid(self) -> int:
        return self.circusd.pids("plugin:dynamo")[0]

    def logs(self) -> str:
        files = (self.served.paths.logs.parent / "circusd_plugin.log", self.served.paths.logs / "dynamo_arbiter.log")
        return "\n".join([self.circusd.log, *(path.read_text() for path in files if path.exists())])

    def watchers(self) -> dict[str, str]:
        return {name: state for name, state in self.circusd.statuses().items() if name.startswith("dynamo_")}


def deployment(served: Served, sections: dict[str, Any], **changes: Any) -> Path:
    """The shipped deployment on any free port, as a file of the test's own; `sections` are merged into it."""
    content = yaml.safe_load((EXAMPLE / "configs" / "disagg.yaml").read_text())
    for name, more in sections.items():
        content[name] = {**content.get(name, {}), **more}
    content["Frontend"]["port"] = 0
    content["Host"]["circusd"] = {**content["Host"]["circusd"], "working-dir": str(EXAMPLE), **changes}
    path = served.folder / "disagg.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@contextmanager
def guest(sections: dict[str, Any] | None = None, **changes: Any) -> Iterator[Guest]:
    """A stock circusd with another watcher and the plugin; at the end both are asserted to have left nothing."""
    # circus leaves its own sockets behind: in a folder apart.
    with Served() as served, tempfile.TemporaryDirectory(prefix="cd-") as folder:
        sections = (
            "[watcher:other]\ncmd = sleep 600\n\n"
            f"[plugin:dynamo]\nuse = {USE}\ndeployment = {deployment(served, sections or {}, **changes)}\n"
        )
        circusd = StockCircusd(Path(folder), sections, env={**served.env, **NOISY_ENV})
        with circusd:
            under = Guest(served, circusd)
            try:
                yield under
            except BaseException as error:
                error.add_note(under.logs()[-6000:])
                raise
            if not circusd.ended():
                circusd.quit()
        until(lambda: served.leftovers() == [], 5.0, what=served.leftovers)
