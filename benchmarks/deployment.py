"""A graph that runs for as long as a benchmark needs it: `dynamo serve` as a user starts it, in folders of its own."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.processes import ROOT, clean_env, dynamo_command
from dynamo_local.state.store import load
from dynamo_local.system.paths import Paths
from dynamo_local.transport.access import run_environment

EXAMPLE = ROOT / "examples" / "llm"
START_TIMEOUT_S = 60.0
DOWN_TIMEOUT_S = 30.0
CONTENT = re.compile(rb'"content":"[^"]')
"""Text; the first event of a chat has a role and empty content."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Private runtime, home and log folders: a benchmark neither sees nor disturbs the user's own graphs."""

    root: Path
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """The environment of every command on this deployment."""
        return {**clean_env(), "XDG_RUNTIME_DIR": str(self.root / "run"), "HOME": str(self.root / "home"), **self.more}


@contextmanager
def folders(more: Mapping[str, str] | None = None) -> Iterator[Folders]:
    """Fresh folders, removed at the end; with `more` variables for every command."""
    with tempfile.TemporaryDirectory(prefix="dyn-bench-") as name:
        root = Path(name)
        for part in ("run", "home"):
            (root / part).mkdir(mode=0o700)
        yield Folders(root, more or {})


@dataclass(frozen=True, slots=True)
class Running:
    """A deployment that is ready."""

    url: str
    folders: Folders
    status: Mapping[str, Any]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def environment(self) -> dict[str, str]:
        """The variables by which its etcd and NATS are reached."""
        namespace = self.status["namespace"]
        return run_environment(load(Paths.of(namespace, self.folders.env).statefile))

    def pids(self) -> dict[str, int]:
        """Name of the part -> pid: workers by component (further ones `component/watcher`), then `arbiter`, `etcd` and
        `nats`."""
        found: dict[str, int] = {}
        for worker in self.status["workers"]:
            name = worker["component"]
            found[f"{name}/{worker['watcher_name']}" if name in found else name] = worker["pid"]
        found["arbiter"] = self.status["arbiter_pid"]
        for child in psutil.Process(found["arbiter"]).children():
            if (name := child.name()) in ("etcd", "nats-server"):
                found[name.partition("-")[0]] = child.pid
        return found


@contextmanager
def served(
    graph: str | None,
    config: Mapping[str, Any],
    *,
    cwd: Path = EXAMPLE,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Running]:
    """The graph (None: the configuration's own commands), detached, from ready to down.

    RuntimeError with the command's words where it does not start.
    """
    with folders(env) as place:
        file = place.root / "config.yaml"
        file.write_text(yaml.safe_dump(dict(config)))
        try:
            words = (*(() if graph is None else (graph,)), "-f", str(file), "--detach")
            run(place, "serve", *words, cwd=cwd, timeout_s=start_timeout_s)
            status = json.loads(run(place, "status", "--json"))
            yield Running(status["frontend_url"], place, status)
        finally:
            down(place)


def run(place: Folders, *words: str, cwd: Path = EXAMPLE, timeout_s: float = DOWN_TIMEOUT_S) -> str:
    """The output of a `dynamo` command. RuntimeError with its stderr if it failed."""
    done = subprocess.run(
        dynamo_command(*words), cwd=cwd, env=place.env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"dynamo {words[0]} ended with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def down(place: Folders) -> None:
    """End whatever runs in these folders; nothing running is no error (exit code 3)."""
    command = dynamo_command("down")
    done = subprocess.run(command, env=place.env, capture_output=True, text=True, timeout=DOWN_TIMEOUT_S, check=False)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"dynamo down ended with exit code {done.returncode}: {done.stderr.strip()}")


def first_token(port: int, model: str) -> float:
    """`time.perf_counter()` at the first streamed token of a chat. RuntimeError if none comes.

    A plain socket: importing a client library would be most of what is measured.
    """
    body = json.dumps(
        {"model": model, "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello."}]}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
        connection.sendall(head + body)
        seen = b""
        while block := connection.recv(65536):
            seen += block
            if CONTENT.search(seen):
                return time.perf_counter()
    raise RuntimeError(f"the stream ended without a token: {seen[-500:]!r}")
