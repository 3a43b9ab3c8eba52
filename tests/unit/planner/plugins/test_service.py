"""Plugins that the configuration names, and those of this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.config.planner import PluginRegistrationConfig, SchedulingConfig
from dynamo_local.planner.plugins import service
from dynamo_local.planner.plugins.service import PluginService
from dynamo_local.planner.stages import PipelineContext, PluginSpec, Stage
from dynamo_local.planner.values import Accept, Override, Prediction, Proposal, Reject
from tests.fakes.planner.plugins import observation, override

ROOT = Path(__file__).parents[4]


class Fixed:
    """Proposes so many decode workers, from a thread that is not the loop's."""

    plugin = PluginSpec("fixed", Stage.PROPOSE, priority=3)
    threads: list[int] = []  # noqa: RUF012

    def __init__(self, decode: int = 7) -> None:
        self.decode = decode

    def propose(self, context: PipelineContext) -> Override:
        self.threads.append(threading.get_ident())
        return override(decode=self.decode)


class Later:
    """A plugin whose methods are coroutines. After a reset it rejects."""

    async def predict(self, context: PipelineContext) -> Prediction:
        await asyncio.sleep(0)
        return Prediction(num_req=42.0)

    async def reconcile(self, context: PipelineContext, proposals: tuple[Proposal, ...]) -> Override | None:
        return override(decode=len(proposals))


class Wrong:
    """Shows what it answers is nothing that a plugin may answer."""

    def propose(self, context: PipelineContext) -> Any:
        return {"decode": 3}

    def constrain(self, context: PipelineContext) -> Any:
        raise ValueError("on purpose\n" + "x" * 9000)


class Unmakeable:
    """It cannot be made."""

    def __init__(self) -> None:
        raise OSError("no licence")


def here(name: str, plugin_type: str, plugin_id: str = "mine", **more: Any) -> dict[str, Any]:
    """An entry of `in_process_plugins` for a class of this module."""
    return {"module": __name__, "class": name, "plugin_id": plugin_id, "plugin_type": plugin_type, **more}


class Side:
    """A service and its ticks."""

    def __init__(
        self,
        tmp_path: Path,
        scheduling: dict[str, Any] | None = None,
        *,
        environ: dict[str, str] | None = None,
        **registration: Any,
    ) -> None:
        self.told: list[str] = []
        self.clock = AsyncioClock()
        self.service = PluginService(
            SchedulingConfig(**(scheduling or {})),
            PluginRegistrationConfig(**registration),
            clock=self.clock,
            environ=environ or {},
            runtime=tmp_path,
            tell=lambda text, about=None: self.told.append(text),
        )

    async def tick(self, *own: Proposal) -> tuple[Prediction | None, dict[str, int]]:
        """The prediction, and the targets by role."""
        seen = observation(self.clock.now_s())
        prediction = await self.service.pipeline.predict(seen, None)
        targets = await self.service.pipeline.targets(seen, prediction, own)
        return prediction, {target.sub_component_type: target.replicas for target in targets}

    def trouble(self, plugin_id: str = "mine") -> str:
        """Of its row."""
        return next(row.trouble or "" for row in self.service.rows() if row.plugin_id == plugin_id)


@pytest.fixture(autouse=True)
def _this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """`importlib` finds it by its name."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[Fixed.__module__])


async def test_a_class_of_the_configuration(tmp_path: Path) -> None:
    side = Side(tmp_path, in_process_plugins=[here("Fixed", "propose", priority=1, kwargs={"decode": 9})])
    await side.service.start()
    assert (await side.tick())[1] == {"decode": 9}
    assert threading.get_ident() not in Fixed.threads
    assert [(row.transport, row.origin) for row in side.service.rows()] == [("in_process", "configured")]
    await side.service.stop()
    assert side.service.rows() == ()


async def test_an_installed_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("broken", "no_such_module:Plugin", service.GROUP),
        EntryPoint("fixed", f"{__name__}:Fixed", service.GROUP),
        EntryPoint("nameless", f"{__name__}:Later", service.GROUP),
    ]
    monkeypatch.setattr(service, "entry_points", lambda group: [p for p in points if p.group == group])
    side = Side(tmp_path)
    await side.service.start()
    assert (await side.tick())[1] == {"decode": 7}
    assert set(side.service.status()["not_taken"]) == {"broken", "nameless"}
    assert len(side.told) == 2
    await side.service.stop()


async def test_coroutines_run_beside_the_loop_too(tmp_path: Path) -> None:
    side = Side(
        tmp_path, in_process_plugins=[here("Later", "predict", "forecast"), here("Later", "reconcile", "arbiter")]
    )
    await side.service.start()
    own = tuple(Proposal(name, 10, Accept()) for name in "abc")
    assert await side.tick(*own) == (Prediction(num_req=42.0, source="forecast"), {"decode": 3})
    await side.service.stop()


@pytest.mark.parametrize(
    ("stage", "trouble"),
    [("propose", "something of type dict is no answer of propose"), ("constrain", "ValueError: on purpose\\n")],
)
async def test_whatever_a_class_does_costs_its_own_word_only(tmp_path: Path, stage: str, trouble: str) -> None:
    side = Side(tmp_path, in_process_plugins=[here("Wrong", stage)])
    await side.service.start()
    assert (await side.tick(Proposal("own", 10, override(decode=3))))[1] == {"decode": 3}
    assert trouble in side.trouble()
    assert side.trouble().isprintable()
    await side.service.stop()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (here("NoSuchClass", "propose"), "AttributeError"),
        ({**here("Fixed", "propose"), "module": "no_such_module"}, "ModuleNotFoundError"),
        (here("Unmakeable", "propose"), "OSError: no licence"),
        (here("Fixed", "propose", kwargs={"nonsense": 1}), "TypeError"),
        (here("Fixed", "constrain"), "has no method constrain"),
        (here("Fixed", "propose", plugin_id="two words"), "plugin_id must be"),
    ],
)
async def test_a_class_that_cannot_be_used_is_told(tmp_path: Path, entry: dict[str, Any], reason: str) -> None:
    side = Side(tmp_path, in_process_plugins=[entry])
    await side.service.start()
    assert side.service.rows() == ()
    assert reason in side.told[0]
    assert (await side.tick(Proposal("own", 10, Reject("no"))))[1] == {}
    await side.service.stop()


async def test_servers_of_the_configuration_are_held_against_the_rules(tmp_path: Path) -> None:

    def server(plugin_id: str, **more: Any) -> dict[str, Any]:
        endpoint = {"endpoint": f"unix://{tmp_path}/p.sock"}
        return {"plugin_id": plugin_id, "plugin_type": "propose", **endpoint, **more}

    servers = [
        server("good"),
        server("port", endpoint="grpc://127.0.0.1:9"),
        server("new", protocol_version="3.0"),
        server("stranger", auth_token="env:SOME_TOKEN"),
        server("known", auth_token="env:TEAM_TOKEN"),
    ]
    auth = {"trusted_sources": ["static_secret"], "static_secrets": {"env:TEAM_TOKEN": "team"}}
    environ = {"TEAM_TOKEN": "secret-of-the-team"}
    side = Side(tmp_path, {"external_plugins": servers}, environ=environ, auth=auth)
    await side.service.start()
    assert {row.plugin_id for row in side.service.rows()} == {"good", "known"}
    reasons = {name: why.partition(":")[0] for name, why in side.service.status()["not_taken"].items()}
    assert reasons == {
        "port": "transport_build_failed",
        "new": "protocol_version_unsupported",
        "stranger": "auth_failed",
    }
    assert "secret-of-the-team" not in str(side.service.status())
    await side.service.stop()


def test_without_such_plugins_nobody_imports_grpc() -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.unit.planner.plugins.test_service import Side

async def main():
    side = Side(Path("/tmp"))
    await side.service.start()
    await side.tick()
    await side.service.stop()

asyncio.run(main())
found = sorted(name for name in sys.modules if name == "grpc" or name.startswith("google.protobuf"))
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
