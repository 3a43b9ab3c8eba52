"""vLLM's parser checks the sections of a graph before anything starts, in a process of its own.

The import of vLLM takes ten seconds and half a gigabyte, and starts threads. An arbiter that forks cannot do that. One
process checks all sections. A graph that passed once is not checked again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_local.engines.vllm import engine_resources
from dynamo_local.errors import ConfigError

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 300.0
"""A cold import takes most of a minute, on a busy host several minutes."""

MARK = "dynamo-local-vllm-check:"
_CODE = (
    "import sys\n"
    "from dynamo_local.engines.vllm.arguments import explain_all\n"
    f"print({MARK!r} + explain_all(sys.stdin.read()))\n"
)
_DEFAULTS_CODE = (
    "import dataclasses, json\n"
    "from vllm.engine.arg_utils import AsyncEngineArgs\n"
    "plain = (str, int, float, bool)\n"
    "found = {f.name: f.default for f in dataclasses.fields(AsyncEngineArgs) if isinstance(f.default, plain)}\n"
    f"print({MARK!r} + json.dumps(found, default=str))\n"
)


@dataclass(frozen=True, slots=True)
class VllmSection:
    """A section's words for vLLM, and the names of the options that are not vLLM's."""

    words: tuple[str, ...]
    own_options: tuple[str, ...]


def is_installed() -> bool:
    """Whether vLLM can be imported here, without importing it."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None  # a mere folder named vllm in the working folder has no origin


def what_is_wrong(sections: Mapping[str, VllmSection]) -> dict[str, str]:
    """Section -> the parser's error, for the sections that vLLM refuses. Raises `ConfigError` if vLLM cannot run."""
    question = json.dumps([[section.words, section.own_options] for section in sections.values()])
    passed = engine_resources.cache_root(os.environ) / "checked" / _digest(question)
    if passed.exists():
        return {}
    found: Sequence[str | None] = json.loads(_asked(_CODE, question))
    wrong = {name: why for name, why in zip(sections, found, strict=True) if why is not None}
    if not wrong:
        try:
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
        except OSError as error:
            log.info("vLLM's parser checks the graph again at the next start: %s", error)
    return wrong


def defaults() -> dict[str, Any]:
    """The plain values that vLLM's options have if they are not given, by name. Raises `ConfigError`."""
    found: dict[str, Any] = json.loads(_asked(_DEFAULTS_CODE, ""))
    return found


def _asked(code: str, question: str) -> str:
    """The answer of a process with vLLM. Raises `ConfigError` if vLLM cannot run."""
    # The check must not touch any GPU.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=question,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"vLLM's parser did not answer within {CHECK_TIMEOUT_S:g} s; try `{sys.executable} -c 'import vllm'`"
        ) from None
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or not answers:
        raise ConfigError(f"vLLM is installed, but cannot be imported: {_last_line(done.stderr)}")
    return answers[-1]


def _digest(question: str) -> str:
    """A digest of the question, and of the vLLM and Python that answer it."""
    versions = [importlib.metadata.version(name) for name in ("vllm", "dynamo-local")]
    return hashlib.sha256(json.dumps([question, sys.executable, *versions]).encode()).hexdigest()


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without output"
