"""A frontend is ready once it lists a model; until then it says what its log says is in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from dynamo_local.components.commands import dynamo_1x
from dynamo_local.components.commands import probe as probing
from dynamo_local.components.commands.child import Child, set_current_child
from dynamo_local.components.commands.dynamo_1x import FrontendDriver, hindrance, lists_model
from dynamo_local.components.commands.launch import Launch
from dynamo_local.components.commands.runner import ChildSilent
from tests.drivers.served import auntil
from tests.fakes.data_plane.worker_context import FakeCluster, FakeWorkerContext

EMPTY, ONE = '{"object": "list", "data": []}', '{"object": "list", "data": [{"id": "tiny"}]}'
LOG = [
    "2026-11-22T09:00:00.000001Z  INFO dynamo_llm::http: listening",
    "\x1b[2m2026-11-22T09:00:01Z\x1b[0m \x1b[31mERROR\x1b[0m dynamo_llm::discovery::watcher: Model materialization"
    " failed model=tiny error=tokenizer.json is not valid",
    "2026-11-22T09:00:02.000001Z  INFO dynamo_runtime: keep-alive",
]


class Frontend:
    """Shows what its port answers now."""

    def __init__(self) -> None:
        self.models: str | None = EMPTY
        self.log = LOG

    async def get(self, url: str, timeout_s: float = 1.0) -> tuple[int, str]:
        if self.models is None:
            raise ChildSilent(f"no answer from {url}")
        return 200, self.models if url.endswith("/v1/models") else "{}"


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontend]:
    made = Frontend()
    monkeypatch.setattr(probing, "get", made.get)
    monkeypatch.setattr(dynamo_1x, "own_log", lambda: made.log)
    monkeypatch.setattr(dynamo_1x, "HINDRANCE_AFTER_S", 0.0)
    monkeypatch.setattr(dynamo_1x, "NO_MODEL_EVERY_S", 0.02)
    yield made
    set_current_child(None)


async def starting(context: FakeWorkerContext) -> asyncio.Task[None]:
    child = Child(Launch(("true",), {"PATH": "/usr/bin:/bin"}, {"http": 1}))
    await child.wait()
    return asyncio.create_task(FrontendDriver(context, child).wait_ready())  # type: ignore[arg-type]


async def test_it_is_not_ready_before_a_model_is_listed(frontend: Frontend) -> None:
    """Its /health says 200 all the time, and every request would get 404; a slow answer is no model either."""
    context = FakeWorkerContext(FakeCluster(), "Frontend", 1, None)
    ready = await starting(context)
    await auntil(lambda: "Model materialization failed" in context.waits_for, what=lambda: context.waits_for)
    assert context.waits_for.startswith("a model: ")
    assert "its log says: ERROR dynamo_llm::discovery::watcher: Model materialization failed" in context.waits_for
    frontend.models = None
    await asyncio.sleep(0.1)
    assert not ready.done()
    frontend.models = ONE
    await asyncio.wait_for(ready, 10.0)


def test_what_is_no_list_of_models_lists_none() -> None:
    for text in (EMPTY, "", "[]", "{}", '{"data": null}', "<html>"):
        assert not lists_model(text)
    assert lists_model(ONE)


def test_the_last_line_that_tells_of_a_failure_is_quoted_without_time_and_colours() -> None:
    assert hindrance(["ERROR first", *LOG]) == (
        "ERROR dynamo_llm::discovery::watcher: Model materialization failed model=tiny error=tokenizer.json is not "
        "valid"
    )
    assert hindrance(["one line", "it Failed to do that"]) == "it Failed to do that"
    assert hindrance(["2026 INFO no error here", ""]) is None
    assert len(hindrance(["ERROR " + "x" * 5000]) or "") == 400
