"""A graph as Dynamo 0.2 users wrote theirs: only the import line differs (golden)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.core.types import Resources, Role
from dynamo_local.sdk import dynamo_context
from dynamo_local.sdk.loader import LoadedGraph, load_graph
from dynamo_local.sdk.service_config import ServiceConfig
from tests.tools.clean_imports import clean_imports

WORKERS = """\
from pydantic import BaseModel

from dynamo_local.sdk import async_on_start, depends, dynamo_context, dynamo_endpoint, on_shutdown, service
from dynamo_local.sdk import ServiceConfig


class Request(BaseModel):
    text: str


@service(
    dynamo={"enabled": True, "namespace": "dynamo"},
    resources={"gpu": "1", "cpu": "10", "memory": "20Gi"},
    workers=1,
)
class PrefillWorker:
    @dynamo_endpoint()
    async def mock(self, req: Request):
        yield f"mock_response: {req.text}"


@service(
    dynamo={"enabled": True, "namespace": "dynamo"},
    resources={"gpu": "1", "cpu": "10", "memory": "20Gi"},
    workers=1,
)
class VllmWorker:
    prefill_worker = depends(PrefillWorker)

    def __init__(self):
        self.engine_args = ServiceConfig.get_instance().as_args(self.__class__.__name__)
        self.component = dynamo_context["component"]
        self.closed = False

    @async_on_start
    async def async_init(self):
        self.runtime = dynamo_context["runtime"]

    @on_shutdown
    async def close(self):
        self.closed = True

    @dynamo_endpoint()
    async def generate(self, request: Request):
        for word in request.text.split():
            yield word
"""

FRONTEND = """\
from pydantic import BaseModel

from components.worker import Request, VllmWorker
from dynamo_local.sdk import depends, endpoint, service
from dynamo_local.sdk import ServiceConfig


class FrontendConfig(BaseModel):
    served_model_name: str
    port: int = 8080


@service(
    dynamo={"enabled": True, "namespace": "dynamo"},
    resources={"cpu": "10", "memory": "20Gi"},
    traffic={"timeout": 30},
    workers=1,
)
class Processor:
    worker = depends(VllmWorker)

    @endpoint(name="chat/completions")
    async def chat_completions(self, raw_request: Request):
        async for response in self.worker.generate(raw_request):
            yield response.upper()


@service(resources={"cpu": "10", "memory": "20Gi"}, workers=1, image="dynamo:latest-vllm")
class Frontend:
    processor = depends(Processor)

    def __init__(self):
        config = ServiceConfig.get_instance()
        self.frontend_config = FrontendConfig(**config.get("Frontend", {}))
"""

GRAPH = """\
from components.frontend import Frontend, Processor
from components.worker import PrefillWorker, VllmWorker

Frontend.link(Processor).link(VllmWorker).link(PrefillWorker)
"""

CONFIG = """\
Common:
  model: deepseek-ai/DeepSeek-R1-Distill-Llama-8B
  block-size: 64
  kv-transfer-config: '{"kv_connector":"DynamoNixlConnector"}'

Frontend:
  served_model_name: deepseek-ai/DeepSeek-R1-Distill-Llama-8B
  endpoint: dynamo.Processor.chat/completions
  port: 8000

Processor:
  router: round-robin
  common-configs: [model, block-size]

VllmWorker:
  remote-prefill: true
  max-local-prefill-length: 10
  ServiceArgs:
    workers: 1
    resources:
      gpu: 1
  common-configs: [model, block-size, kv-transfer-config]

PrefillWorker:
  max-num-batched-tokens: 16384
  ServiceArgs: {workers: 2}
  common-configs: [model, block-size]

Planner:
  environment: local
  no-operation: true
"""


class Client:
    """The worker's client as the entry point binds it."""

    async def generate(self, request: Any) -> AsyncIterator[str]:
        for word in request.text.split():
            yield word


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The ported files, and a worker's environment."""
    files = {
        "components/worker.py": WORKERS,
        "components/frontend.py": FRONTEND,
        "graphs/disagg.py": GRAPH,
        "c.yaml": CONFIG,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", load_config(tmp_path / "c.yaml", env={}).service_config_json())
    ServiceConfig.reset()
    dynamo_context.clear()
    with clean_imports():
        yield tmp_path
    dynamo_context.clear()
    ServiceConfig.reset()


@pytest.fixture
def graph(folder: Path) -> LoadedGraph:
    """Loaded as `dynamo serve graphs.disagg:Frontend` does."""
    return load_graph("graphs.disagg:Frontend", base_dir=folder)


def test_ported_graph_resolves(folder: Path, graph: LoadedGraph) -> None:
    spec = resolve(graph, load_config(folder / "c.yaml", env={}), namespace=None)

    assert spec.namespace == "dynamo"
    assert [(s.name, s.role, s.workers, s.resources, s.endpoints) for s in spec.services] == [
        ("Frontend", Role.FRONTEND, 1, Resources(0, "10", "20Gi"), ()),
        ("Processor", Role.OTHER, 1, Resources(0, "10", "20Gi"), ("chat/completions",)),
        ("VllmWorker", Role.DECODE, 1, Resources(1, "10", "20Gi"), ("generate",)),
        ("PrefillWorker", Role.PREFILL, 2, Resources(1, "10", "20Gi"), ("mock",)),
    ]


async def test_ported_worker_starts_with_its_arguments_and_context(graph: LoadedGraph) -> None:
    """`ServiceConfig.as_args`, `dynamo_context`, `@async_on_start` and `@on_shutdown` as they were."""
    dynamo_context.update(component="component", runtime="runtime")
    declared = graph.services["VllmWorker"]

    worker = declared.create({"prefill_worker": "client"})
    for hook in (*declared.on_start, *declared.on_shutdown):
        await getattr(worker, hook)()

    assert worker.engine_args[:4] == ["--model", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "--block-size", "64"]
    assert worker.engine_args[-3:] == ["--remote-prefill", "--max-local-prefill-length", "10"]
    assert (worker.component, worker.runtime, worker.closed) == ("component", "runtime", True)


async def test_ported_endpoint_calls_its_dependency(graph: LoadedGraph) -> None:
    declared = graph.services["Processor"]
    processor = declared.create({"worker": Client()})
    endpoint = declared.endpoints["chat/completions"]
    model: Any = declared.request_model(endpoint.name)

    stream = getattr(processor, endpoint.method)(model.model_validate({"text": "a b"}))

    assert endpoint.is_stream
    assert [item async for item in stream] == ["A", "B"]


def test_ported_frontend_reads_its_section(graph: LoadedGraph) -> None:
    frontend = graph.services["Frontend"].create({"processor": Client()})

    assert frontend.frontend_config.port == 8000
