"""A manifest for Kubernetes, imported, runs on this host: Dynamo's own processes, started as the operator would."""

from __future__ import annotations

import asyncio

import pytest
import yaml

from dynamo_local.kubernetes.import_graph import import_graph, read_documents
from tests.drivers.scaled import names
from tests.drivers.served import ROOT
from tests.dynamo1x.dynamo_graphs import DynamoServed, ask, instances, listed

MODEL = ROOT / "dynamo_local" / "components" / "text" / "tiny_tokenizer"
MOCKER = "python3 -m dynamo.mocker --model-path $MODEL_PATH --model-name tiny --disaggregation-mode"
MANIFEST = f"""
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {{name: mocked}}
spec:
  env:
  - {{name: DYN_ROUTER_MODE, value: kv}}
  components:
  - name: Frontend
    type: frontend
    podTemplate: {{spec: {{containers: [{{name: main, image: "image:1"}}]}}}}
  - name: decode
    type: worker
    replicas: 2
    podTemplate:
      spec:
        containers:
        - name: main
          image: image:1
          args: ["{MOCKER} decode"]
          env: [{{name: MODEL_PATH, value: {MODEL}}}, {{name: DYN_SYSTEM_PORT, value: "9090"}}]
  - name: prefill
    type: prefill
    replicas: 1
    podTemplate:
      spec:
        containers:
        - name: main
          image: image:1
          command: [python3, -m, dynamo.mocker]
          args: [--model-path, $(MODEL_PATH), --model-name, tiny, --disaggregation-mode, prefill]
          env: [{{name: MODEL_PATH, value: {MODEL}}}]
"""


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_an_imported_manifest_answers_requests() -> None:
    found = import_graph(read_documents(MANIFEST, "test"), "test")
    files = {"imported.yaml": yaml.safe_dump(dict(found.sections), sort_keys=False)}
    target = ("-f", "imported.yaml")
    with DynamoServed("--Frontend.ports.http=0", target=target, files=files, frontend=False).started() as served:
        await listed(served)
        assert (len(instances(served)), len(instances(served, "prefill"))) == (2, 1)
        assert (len(names(served, "decode")), len(names(served, "prefill"))) == (2, 1)
        async with served.client() as client:
            answers = await asyncio.gather(*(ask(client, f"what is a manifest, {n}?", 20) for n in range(8)))
        assert answers == [20] * 8
