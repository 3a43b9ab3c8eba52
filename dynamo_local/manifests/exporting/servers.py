"""Plain `vllm serve`, which a Frontend of ours is in front of, as Dynamo 1.x's vLLM worker, which registers itself."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.types import Role
from dynamo_local.kubernetes.program import MODE, is_python, option
from dynamo_local.manifests.notes import Kind, Note

MODULE = "vllm.entrypoints.openai.api_server"
_LISTENS = "the worker does not listen for clients: Dynamo's frontend does"
_WITH_VALUE = dict.fromkeys(
    (
        *("--host", "--port", "--uds", "--root-path", "--api-key", "--uvicorn-log-level", "--api-server-count"),
        *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--allowed-origins", "--allowed-methods"),
        *("--allowed-headers", "--middleware", "--response-role", "--chat-template-content-format"),
    ),
    _LISTENS,
)
_FLAGS = dict.fromkeys(
    ("--disable-uvicorn-access-log", "--allow-credentials", "--enable-request-id-headers", "--disable-fastapi-docs"),
    _LISTENS,
)
_FLAGS["--enable-auto-tool-choice"] = "Dynamo's worker needs --dyn-tool-call-parser alone"
_RENAMED = {"--tool-call-parser": "--dyn-tool-call-parser", "--reasoning-parser": "--dyn-reasoning-parser"}
"""Dynamo's frontend parses what the worker names."""


def is_vllm_server(words: Sequence[str]) -> bool:
    """`vllm serve …`, or its module."""
    if len(words) >= 3 and is_python(words[0]) and tuple(words[1:3]) == ("-m", MODULE):
        return True
    return len(words) >= 2 and words[0].rpartition("/")[2] == "vllm" and words[1] == "serve"


def as_worker(
    words: Sequence[str], role: Role, where: str, served_model_name: str | None
) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    """The words of `python3 -m dynamo.vllm` in place of the server's. `is_vllm_server` is true of them."""
    options = list(words[3:] if is_python(words[0]) else words[2:])
    model: list[str] = []
    if options and not options[0].startswith("-"):
        model = ["--model", options.pop(0)]
    kept, notes = _translated(options, where)
    if served_model_name is not None and option(kept, "--served-model-name") is None:
        kept += ["--served-model-name", served_model_name]
    mode = [MODE, str(role)] if role in (Role.PREFILL, Role.DECODE) else []
    changed = Note(Kind.CHANGED, where, "python3 -m dynamo.vllm in place of the server: Dynamo's frontend finds it")
    return ("python3", "-m", "dynamo.vllm", *model, *kept, *mode), (changed, *notes)


def _translated(options: Sequence[str], where: str) -> tuple[list[str], list[Note]]:
    """Options of the engine as they are; those of the HTTP server left out, with their values."""
    kept: list[str] = []
    notes: list[Note] = []
    dropping = False
    for word in options:
        name, equals, _ = word.partition("=")
        if dropping and not word.startswith("--"):
            continue
        dropping = False
        if name in _WITH_VALUE or name in _FLAGS:
            dropping = not equals and name in _WITH_VALUE
            why = _WITH_VALUE.get(name) or _FLAGS[name]
            notes.append(Note(Kind.LEFT_OUT, where, f"{name}: {why}"))
        elif name in _RENAMED:
            kept.append(_RENAMED[name] + word[len(name) :])
            notes.append(Note(Kind.CHANGED, where, f"{name} is {_RENAMED[name]} of Dynamo's worker"))
        else:
            kept.append(word)
    return kept, notes
