"""Requests for benchmarks and tests: somebody's recorded hour where it is to be had, else a generated one.

A recorded trace is somebody else's data and not part of this repository. It is looked for in the folder `$DYN_TRACES`,
else in `../shared/data/traces` beside the checkout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from dynamo_local.errors import BadInput
from dynamo_local.simulator.generator import generate, parse_generated
from dynamo_local.simulator.trace import TraceRequest, read_trace

FOLDER = "DYN_TRACES"
BESIDE = Path(__file__).parents[2] / "shared" / "data" / "traces"
CONVERSATION = "conversation_trace.jsonl.gz"
SOURCE = "https://github.com/kvcache-ai/Mooncake has it (FAST25-release/traces/conversation_trace.jsonl; gzip it)"
CHAT = "chat"
SINUSOID = "sin"


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by time. `name` says what they are; `missing` where the recorded ones were looked for in vain."""

    name: str
    rows: list[TraceRequest]
    recorded: bool = False
    missing: str = ""

    @property
    def told(self) -> str:
        """One line with all of it."""
        return f"{self.name}; {self.missing}" if self.missing else self.name


def conversation(limit: int | None = None, env: Mapping[str, str] = os.environ) -> Requests:
    """An hour of a chat service: recorded (Mooncake's conversation trace), else made like it. Raises `BadInput`.

    `limit` takes the first so many requests.
    """
    return kept(CONVERSATION, CHAT, limit, env, where=f" ({FOLDER} names another folder): {SOURCE}")


def kept(
    name: str, like: str, limit: int | None = None, env: Mapping[str, str] = os.environ, *, where: str = ""
) -> Requests:
    """The recorded trace of that name where it is to be had, else requests that are generated like it. `where` says
    how else it may be had. Raises `BadInput`."""
    file = folder(env) / name
    if file.exists():
        return Requests(f"recorded requests ({name})", read_trace(file, limit=limit), recorded=True)
    return replace(generated(like, limit), missing=f"no recorded ones in {file.parent}{where}")


def generated(word: str, limit: int | None = None) -> Requests:
    """Requests that `dynamo simulate --generate WORD` would make; the first `limit` of them."""
    asked = parse_generated(word)
    return Requests(f"generated requests ({asked})", list(islice(generate(asked.options), limit)))


def folder(env: Mapping[str, str]) -> Path:
    """Where recorded traces lie, if anywhere. Raises `BadInput` if a folder was named that does not exist."""
    named = env.get(FOLDER)
    if not named:
        return BESIDE
    if not Path(named).is_dir():
        raise BadInput(f"{FOLDER} is {named}, which is no folder; unset it to do without recorded traces")
    return Path(named)
