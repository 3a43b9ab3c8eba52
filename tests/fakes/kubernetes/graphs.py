"""Graphs as one deploys them, in both versions."""

from __future__ import annotations

from typing import Any

NAME = "serving"
MODEL = "Qwen/Qwen3-0.6B"
PREFILL, DECODE = "VllmPrefillWorker", "VllmDecodeWorker"


def main(mode: str | None = None, *, gpus: int | None = 1, model: str = MODEL) -> dict[str, Any]:
    args = ["-m", "dynamo.vllm", "--model", model, *(() if mode is None else ("--disaggregation-mode", mode))]
    limits = {} if gpus is None else {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {"name": "main", "image": "vllm-runtime:1", "command": ["python3"], "args": args, **limits}


def component(name: str, kind: str, replicas: int | None = 1, **more: Any) -> dict[str, Any]:
    mode = kind if kind in ("prefill", "decode") else None
    container = more.pop("main", {"name": "main", "image": "x"} if kind == "frontend" else main(mode))
    told = {} if replicas is None else {"replicas": replicas}
    return {"name": name, "type": kind, **told, "podTemplate": {"spec": {"containers": [container]}}, **more}


def beta(prefill: int | None = 1, decode: int | None = 1, *, adapters: bool = False, **more: Any) -> dict[str, Any]:
    adapter = {"scalingAdapter": {}} if adapters else {}
    return _object(
        "v1beta1",
        {
            "components": [
                component("Frontend", "frontend"),
                component(DECODE, "decode", decode, **adapter),
                component(PREFILL, "prefill", prefill, **adapter),
            ]
        },
        more,
    )


def alpha(prefill: int = 1, decode: int = 1) -> dict[str, Any]:
    def service(mode: str, replicas: int) -> dict[str, Any]:
        container = {key: value for key, value in main(mode, gpus=None).items() if key != "name"}
        return {
            "componentType": "worker",
            "subComponentType": mode,
            "replicas": replicas,
            "resources": {"limits": {"gpu": "1"}},
            "extraPodSpec": {"mainContainer": container},
        }

    frontend = {"componentType": "frontend", "replicas": 1, "extraPodSpec": {"mainContainer": {"image": "x"}}}
    services = {"Frontend": frontend, DECODE: service("decode", decode), PREFILL: service("prefill", prefill)}
    return _object("v1alpha1", {"services": services}, {})


def adapter(component_name: str, replicas: int = 1, *, graph: str = NAME) -> dict[str, Any]:
    """The scaling adapter of a component of a v1beta1 graph, as the operator makes it."""
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeploymentScalingAdapter",
        "metadata": {"name": f"{graph}-{component_name.lower()}"},
        "spec": {"replicas": replicas, "dgdRef": {"name": graph, "componentName": component_name}},
    }


def _object(version: str, spec: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": f"nvidia.com/{version}",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": NAME},
        "spec": spec,
        **more,
    }
