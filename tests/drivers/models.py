"""Several models behind one port: a deployment of them, and requests to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import yaml

from tests.drivers.served import Served

FILE = "models.yaml"


def of_models(
    models: Mapping[str, Mapping[str, Any]], gpus: str, *words: str, host: Mapping[str, Any] | None = None, **more: Any
) -> Served:
    """`dynamo serve -f models.yaml WORDS…` on these GPUs, not started. `more` is of `Served`."""
    text = yaml.safe_dump({"Host": {"gpus": gpus, **(host or {})}, "Models": {**models}})
    return Served("-f", FILE, *words, target=(), files={FILE: text}, **more)


def chat(model: str, tokens: int = 4, *, stream: bool = False) -> dict[str, object]:
    """The body of a short request."""
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}


def ask(served: Served, model: str) -> httpx.Response:
    """The answer to one short request."""
    return httpx.post(f"{served.url}/v1/chat/completions", json=chat(model), timeout=120.0)


def row(served: Served, model: str) -> dict[str, Any]:
    """The model's row in `dynamo status`."""
    return next(each for each in served.status()["models"] if each["model"] == model)
