"""A server as `vllm serve` is one, without a model: for tests and examples of `runtime: http` on any host.

    python tests/tools/openai_server.py --port 8000 --model tiny --record requests.jsonl

It answers `/health`, `/metrics` (vLLM's names), `/v1/models`, `/v1/completions`, `/v1/chat/completions` and
`/v1/embeddings`. Token n of an answer is the text `n `. With `kv_transfer_params` it hands prompts over as vLLM's
NIXL connector does: who prefills keeps the prompt until who decodes has fetched it, and who cannot fetch it answers
500. SIGTERM cuts what still streams, as vLLM does. `--record` gets a line of JSON for each request and each end.
With `--role` it takes requests of that role alone, and `POST /pd_role_switch` changes it as SGLang 0.5.21 does: while
nothing runs or is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

DEFAULT_TOKENS = 16
KV_BLOCKS = 1000


@dataclass
class Server:
    """The server's state, and how it is to behave. Without a `model` it lists none. `refuse` answers everything
    with that status; a `forgetful` one keeps no prompt that it has prefilled, as one that died in between. `role` is
    None for one that takes all; `stuck` says why it never changes."""

    model: str = "tiny"
    port: int = 0
    token_s: float = 0.01
    prefill_s: float = 0.0
    prompt_token_s: float = 0.0
    """Seconds of a prefill for each token of a prompt that no earlier prompt began with."""
    seq_s: float = 0.0
    """Seconds of each token for each request that runs."""
    block_size: int | None = None
    record_file: Path | None = None
    refuse: int | None = None
    silent_metrics: bool = False
    forgetful: bool = False
    role: str | None = None
    stuck: str | None = None
    switch_s: float = 0.0
    switching: bool = False
    running: int = 0
    tokens: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    prompts: set[tuple[int, ...]] = field(default_factory=set)
    """Prompts of tokens that were computed: the cache of prefixes."""
    kept: set[str] = field(default_factory=set)
    """Prompts that were prefilled and not fetched yet."""

    def note(self, **what: Any) -> None:
        self.seen.append(what)
        if self.record_file is not None:
            with self.record_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"port": self.port, **what}) + "\n")

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


def make_app(server: Server) -> Starlette:
    async def health(_: Request) -> Response:
        return Response(status_code=200)

    async def models(_: Request) -> Response:
        if not server.model:
            return Response(status_code=404)
        card = {"id": server.model, "object": "model", "created": 1700000000, "owned_by": "vllm", "max_model_len": 4096}
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse("" if server.silent_metrics else exposition(server))

    async def fetch(request: Request) -> Response:
        try:
            server.kept.remove(request.path_params["key"])
        except KeyError:
            return Response(status_code=404)
        return Response(status_code=200)

    async def embeddings(request: Request) -> Response:
        body = await request.json()
        server.note(path=request.url.path, body=body, headers=_tell_observers(request))
        return JSONResponse({"object": "list", "model": body["model"], "data": [{"index": 0, "embedding": [0.5]}]})

    async def generate(request: Request) -> Response:
        return await _generate(server, request)

    async def switch(request: Request) -> Response:
        status, told = await _switched(server, (await request.json()).get("new_role"))
        server.note(switch=told)
        return JSONResponse(told, status)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/completions", generate, methods=["POST"]),
            Route("/v1/chat/completions", generate, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/kv/{key}", fetch, methods=["POST"]),
            Route("/pd_role_switch", switch, methods=["POST"]),
        ]
    )


def exposition(server: Server) -> str:
    label = f'{{engine="0",model_name="{server.model}"}}'
    size = "" if server.block_size is None else f',block_size="{server.block_size}"'
    usage = min(1.0, (server.running + len(server.kept)) / 20)
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {float(server.running)}\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{label} 0.0\n"
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{label} {usage}\n"
        f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{label} {float(server.tokens)}\n"
        f'# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{num_gpu_blocks="{KV_BLOCKS}"{size}}} 1.0\n'
    )


async def _switched(server: Server, role: str | None) -> tuple[int, dict[str, Any]]:
    """Status and answer, in SGLang's words where somebody reads them."""
    old, refusal, lost = server.role, "", False
    if server.switching:
        refusal, lost = "another role switch is already in progress", True
    elif old is None or role not in ("prefill", "decode"):
        refusal = f"invalid new_role={role!r}"
    elif role == old:
        return 200, {"success": True, "message": "already in target role", "old_role": old, "new_role": role}
    elif server.stuck is not None:
        refusal, lost = server.stuck, True
    elif server.running or server.kept:
        refusal = "instance is not idle"
    if refusal:
        return 400, {"success": False, "message": refusal, "safe_to_restore": not lost}
    server.switching = True
    await asyncio.sleep(server.switch_s)
    server.switching, server.role = False, role
    return 200, {"success": True, "message": "ok", "old_role": old, "new_role": role}


async def _generate(server: Server, request: Request) -> Response:
    body = await request.json()
    server.note(path=request.url.path, body=body, headers=_tell_observers(request))
    if server.refuse is not None:
        status = server.refuse
        headers = {"retry-after": "7"} if status in (429, 503) else {}
        return JSONResponse({"error": {"message": f"refused with {status}", "code": status}}, status, headers)
    if body.get("model") != server.model:
        return JSONResponse({"error": {"message": f"no model {body.get('model')}", "code": 404}}, 404)
    chat = request.url.path.endswith("chat/completions")
    count = int(body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS)
    params = body.get("kv_transfer_params") or {}
    asked_of = "prefill" if params.get("do_remote_decode") else "decode"
    if server.switching or server.role not in (None, asked_of):
        server.note(wrong_role=server.role)
        return JSONResponse({"error": {"message": f"this server is {server.role}", "code": 400}}, 400)
    if params.get("do_remote_prefill"):
        if not await _fetched(params):
            return JSONResponse({"error": {"message": "the KV could not be loaded", "code": 500}}, 500)
    else:
        with server.one():
            await asyncio.sleep(server.prefill_s + server.prompt_token_s * _not_cached(server, body.get("prompt")))
    if body.get("stream"):
        return StreamingResponse(_events(server, chat, count), media_type="text/event-stream")
    return await _whole(server, request, chat, count, params)


def _not_cached(server: Server, prompt: object) -> int:
    """Tokens of the prompt that have to be computed; none of a text, whose tokens nobody counts here."""
    if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
        return 0
    there = max((len(known) for known in server.prompts if tuple(prompt[: len(known)]) == known), default=0)
    server.prompts.add(tuple(prompt))
    return len(prompt) - there


def _tell_observers(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in ("x-request-id", "authorization") if name in request.headers}


async def _fetched(params: dict[str, Any]) -> bool:
    url = f"http://{params['remote_host']}:{params['remote_port']}/kv/{params['remote_engine_id']}"
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        try:
            return (await client.post(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


async def _events(server: Server, chat: bool, count: int) -> AsyncIterator[bytes]:
    done = False
    with server.one():
        try:
            if chat:
                yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for n in range(count):
                await asyncio.sleep(server.token_s + server.seq_s * server.running)
                server.tokens += 1
                reason = "length" if n == count - 1 else None
                choice = {"delta": {"content": f"{n} "}} if chat else {"text": f"{n} "}
                yield _event({"choices": [{"index": 0, **choice, "finish_reason": reason}]})
            yield b"data: [DONE]\n\n"
            done = True
        finally:
            server.note(ended="complete" if done else "cut")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"id": "x", "object": "chunk", "created": 1, "model": "m", **body}).encode() + b"\n\n"


async def _whole(server: Server, request: Request, chat: bool, count: int, params: dict[str, Any]) -> Response:
    done = False
    with server.one():
        try:
            for _ in range(count):
                await asyncio.sleep(server.token_s)
                server.tokens += 1
                if await request.is_disconnected():
                    return Response(status_code=499)
            done = True
        finally:
            server.note(ended="complete" if done else "cut")
    text = "".join(f"{n} " for n in range(count))
    choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    answer: dict[str, Any] = {
        "id": "x",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": server.model,
        "choices": [{"index": 0, "finish_reason": "length", **choice}],
        "usage": {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count},
    }
    if params.get("do_remote_decode"):
        key = uuid.uuid4().hex
        if not server.forgetful:
            server.kept.add(key)
        answer["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": key,
            "remote_block_ids": [1, 2],
            "remote_host": "127.0.0.1",
            "remote_port": server.port,
        }
    return JSONResponse(answer)


class _Uvicorn(uvicorn.Server):
    """Says what it cuts when it is asked to go."""

    def __init__(self, config: uvicorn.Config, state: Server) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: Any) -> None:
        if sig == signal.SIGTERM:
            self._state.note(sigterm_with=self._state.running)
        super().handle_exit(sig, frame)


async def _run(server: Server, start_up_s: float) -> None:
    await asyncio.sleep(start_up_s)
    server.note(started=os.getpid())
    config = uvicorn.Config(
        make_app(server), host="127.0.0.1", port=server.port, log_level="warning", timeout_graceful_shutdown=0
    )
    await _Uvicorn(config, server).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--token-s", type=float, default=0.01)
    parser.add_argument("--prefill-s", type=float, default=0.0)
    parser.add_argument("--prompt-token-s", type=float, default=0.0)
    parser.add_argument("--seq-s", type=float, default=0.0)
    parser.add_argument("--block-size", type=int, help="of its KV cache; without it nobody knows how much that holds")
    parser.add_argument("--start-up-s", type=float, default=0.0)
    parser.add_argument("--forgetful", action="store_true")
    parser.add_argument("--role", choices=("prefill", "decode"))
    parser.add_argument("--stuck", help="why it never changes its role")
    parser.add_argument("--switch-s", type=float, default=0.0)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    server = Server(
        model=given.model,
        port=given.port,
        token_s=given.token_s,
        prefill_s=given.prefill_s,
        prompt_token_s=given.prompt_token_s,
        seq_s=given.seq_s,
        block_size=given.block_size,
        forgetful=given.forgetful,
        role=given.role,
        stuck=given.stuck,
        switch_s=given.switch_s,
        record_file=given.record,
    )
    asyncio.run(_run(server, given.start_up_s))
    sys.exit(0)


if __name__ == "__main__":
    main()
