"""The fake API server, and a frontend's /metrics, over HTTP: for a planner in a process of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dynamo_local.kubernetes.api import ApiAway
from tests.fakes.kubernetes.api_server import Kube


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def api_over_http(kube: Kube) -> type[BaseHTTPRequestHandler]:
    """Every request goes to the fake; while it is away, connections are cut."""
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = self.headers.get("Content-Type") or "application/json"
            asked = kube.client().request(self.command, self.path, json.loads(text or b"null"), content=content)
            try:
                with one_at_a_time:
                    answer = asyncio.run(asked)
            except ApiAway:
                self.close_connection = True
                return
            _reply(self, answer.status, json.dumps(answer.body), "application/json")

        do_GET = do_POST = do_PUT = do_PATCH = _answer

        def log_message(self, *_: object) -> None: ...

    return Handler


def frontend(rate: Callable[[], float], lengths: Callable[[], tuple[int, int]]) -> type[BaseHTTPRequestHandler]:
    """Dynamo's frontend as far as a planner asks it: its counters grow by so many requests per second of these ISL and
    OSL. It tells no latencies."""
    counted = {"requests": 0.0, "at_s": time.monotonic()}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                now_s = time.monotonic()
                counted["requests"] += rate() * (now_s - counted["at_s"])
                counted["at_s"] = now_s
                n = counted["requests"]
            lines = [f'dynamo_frontend_requests_started_total{{model="m"}} {n}']
            for name, mean in zip(("input_sequence_tokens", "output_sequence_tokens"), lengths(), strict=True):
                lines += [f"dynamo_frontend_{name}_sum {n * mean}", f"dynamo_frontend_{name}_count {n}"]
            _reply(self, 200, "\n".join([*lines, ""]), "text/plain")

        def log_message(self, *_: object) -> None: ...

    return Handler


def _reply(handler: BaseHTTPRequestHandler, status: int, text: str, kind: str) -> None:
    body = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def kubeconfig(url: str, path: Path) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": {"server": url}}],
        "users": [{"name": "user", "user": {"token": "t"}}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "user", "namespace": "default"}}],
        "current-context": "local",
    }
    path.write_text(json.dumps(config))
    return path
