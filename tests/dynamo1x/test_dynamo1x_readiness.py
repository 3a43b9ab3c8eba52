"""A graph of Dynamo 1.x's processes is ready once its frontend lists a model, and else says what is in the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.drivers.served import ROOT, until
from tests.dynamo1x.dynamo_graphs import MODEL, WAIT_S, graph

pytestmark = [pytest.mark.timeout(300)]

TOKENIZER = ROOT / "dynamo_local" / "components" / "text" / "tiny_tokenizer"
WHY = "Model materialization failed"


@pytest.mark.full
async def test_once_it_is_ready_it_lists_its_model() -> None:
    with graph("agg").started() as served:
        async with served.client() as client:
            assert [model.id async for model in client.models.list()] == [MODEL]


@pytest.mark.full
def test_without_a_model_it_is_not_ready_and_quotes_the_reason(tmp_path: Path) -> None:
    model = Path(shutil.copytree(TOKENIZER, tmp_path / "model"))
    (model / "tokenizer.json").write_text('{"broken": 1}')
    with graph("agg", f"--Mocker.model={model}", "--start-deadline", "25") as served:
        starting = served.popen(*served.serve_words())
        until(lambda: served.cli_status().get("workers"), WAIT_S, what=served.foreground_output)
        until(lambda: WHY in (served.worker("Frontend")["reason"] or ""), WAIT_S, what=served.foreground_output)
        assert served.status()["state"] == "starting"
        assert served.states()["Frontend"] == "starting"
        assert starting.wait(WAIT_S) != 0
        told = served.foreground_output()
        assert "waits for a model: it answers, but its /v1/models lists none; its log says: " in told
        assert WHY in told
