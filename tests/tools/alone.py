"""A graph of one component without a frontend: quick to start. Its name makes it a decode worker."""

from __future__ import annotations

from tests.drivers.served import Served

APP = """\
from dynamo_local.sdk import endpoint, service


@service(name="{name}", resources={{"gpu": 1}})
class Worker:
    @endpoint()
    async def generate(self, request: dict):
        yield {{}}
"""


def alone(*words: str, name: str = "VllmWorker", **yaml: str) -> Served:
    """On eight simulated GPUs; `yaml` are files of its folder, by name without the ending."""
    files = {"app.py": APP.format(name=name), **{f"{key}.yaml": text for key, text in yaml.items()}}
    return Served("--gpus", "sim:8", *words, target=("app:Worker",), files=files, frontend=False)
