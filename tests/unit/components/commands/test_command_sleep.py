"""Commands that sleep: by hooks, and a `vllm serve` by its own endpoints; what is refused before anything starts."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from dynamo_local.components.commands.graph import check_commands, with_commands
from dynamo_local.components.commands.sleep import CommandSleep, HookCommands, ServerSleep, why_not
from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.config.loading import load_config
from dynamo_local.engines.sleep import EngineStandby, WakeCorrupted
from dynamo_local.errors import ConfigError, EngineError

VLLM = ("vllm", "serve", "m", "--port", "{port:http}", "--host", "127.0.0.1", "--enable-sleep-mode")


# --- before anything starts ------------------------------------------------------------------------


def check(text: str) -> None:
    """What `--dry-run` checks of a file of commands."""
    config = load_config(None, env={"DYN_DEPLOYMENT_CONFIG": text})
    check_commands(with_commands(None, config, None), config, {"PATH": "/bin"}, only_plan=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("W: {command: [sleep, 9], ServiceArgs: {standby: 1}}", "give `sleep-hook` and `wake-hook`"),
        ("W: {command: [sleep, 9], sleep-hook: a, wake-hook: b}", "no effect without ServiceArgs.standby"),
        ("W: {command: [sleep, 9], sleep-hook: a, ServiceArgs: {standby: 0}}", "belong together"),
        (
            "W: {command: [s, '{port:a}'], sleep-hook: 'x {port:b}', wake-hook: y, ServiceArgs: {standby: 0}}",
            "the command does not listen there",
        ),
    ],
)
def test_a_standby_that_could_never_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        check(text)
    assert "W" in str(refused.value)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("sglang", "serve"), "only `vllm serve` has sleep endpoints"),
        (VLLM[:-1], "needs --enable-sleep-mode"),
        ((*VLLM[:5], "--enable-sleep-mode"), "it would listen on all addresses"),
        (("vllm", "serve", "m", "--host=0.0.0.0", "--enable-sleep-mode"), "on 0.0.0.0"),
        ((*VLLM, "--kv-transfer-config", "{}"), "with a KV connector"),
        (VLLM, None),
        (("python", "-m", "vllm.entrypoints.openai.api_server", "--host=localhost", "--enable-sleep-mode"), None),
    ],
)
def test_the_sleep_endpoints_of_vllm_never_leave_loopback(words: tuple[str, ...], why: str | None) -> None:
    found = why_not(words)
    assert (found is None) == (why is None)
    assert why is None or why in str(found)


# --- hooks -----------------------------------------------------------------------------------------


def hooks(tmp_path: Path, sleep: str, wake: str) -> HookCommands:
    """Python programs as hooks; they are told the level, and write down that they ran."""
    config = SimpleNamespace(
        sleep_hook=[sys.executable, "-c", sleep], wake_hook=[sys.executable, "-c", wake], model="m"
    )
    context: Any = SimpleNamespace(namespace="dynamo", watcher_name="dynamo_W", settings=config)
    launch = SimpleNamespace(ports={}, env={"PATH": "/usr/bin:/bin", "OUT": str(tmp_path / "out")})
    child: Any = SimpleNamespace(launch=launch)
    return HookCommands(context, child)


WRITES = "import os; open(os.environ['OUT'], 'a').write({!r} + os.environ['DYN_SLEEP_LEVEL'])"


async def test_hooks_run_to_their_end_and_know_the_level(tmp_path: Path) -> None:
    sleeper = CommandSleep(hooks(tmp_path, WRITES.format("s"), WRITES.format("w")))
    await sleeper.sleep(2)
    await sleeper.wake()
    assert (tmp_path / "out").read_text() == "s2w2"
    assert await sleeper.probe() == ()


async def test_a_hook_that_fails_says_so_in_its_own_words(tmp_path: Path) -> None:
    sleeper = CommandSleep(hooks(tmp_path, "raise SystemExit('no such checkpoint')", "pass"))
    with pytest.raises(EngineError, match="ended with exit code 1: no such checkpoint"):
        await sleeper.sleep(1)


# --- vllm serve ------------------------------------------------------------------------------------


class Server:
    """The endpoints of a `vllm serve` in its development mode. `asleep`: the tags that are away."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.level = 0
        self.loaded = True
        self.cached = True
        self.port = 0

    async def sleep(self, request: Request) -> JSONResponse:
        self.level = int(request.query_params["level"])
        self.asleep, self.loaded = {"weights", "kv_cache"}, self.level == 1
        return JSONResponse({})

    async def wake_up(self, request: Request) -> JSONResponse:
        self.asleep -= set(request.query_params.getlist("tags") or self.asleep)
        return JSONResponse({})

    async def is_sleeping(self, _request: Request) -> JSONResponse:
        return JSONResponse({"is_sleeping": bool(self.asleep)})

    async def reset(self, _request: Request) -> JSONResponse:
        self.cached = False
        return JSONResponse({})

    async def rpc(self, request: Request) -> JSONResponse:
        asked = await request.json()
        if asked != {"method": "reload_weights"} or self.asleep != {"kv_cache"}:
            return JSONResponse({"asked": asked}, status_code=500)
        self.loaded = True
        return JSONResponse({})

    async def completions(self, request: Request) -> JSONResponse:
        asked = await request.json()
        assert (asked["temperature"], asked["max_tokens"]) == (0, 16)
        text = "as ever" if self.loaded and not self.asleep else "gibberish"
        return JSONResponse({"choices": [{"text": text}]})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """It listens on `port`."""
    state = Server()
    routes = {
        "/sleep": state.sleep,
        "/wake_up": state.wake_up,
        "/reset_prefix_cache": state.reset,
        "/collective_rpc": state.rpc,
        "/v1/completions": state.completions,
    }
    app = Starlette(
        routes=[
            *(Route(path, handler, methods=["POST"]) for path, handler in routes.items()),
            Route("/is_sleeping", state.is_sleeping),
        ]
    )
    sock = bind_socket("127.0.0.1", 0)
    state.port = sock.getsockname()[1]
    http = HttpServer(app, sock)
    await http.start()
    try:
        yield state
    finally:
        await http.stop()


def standby_of(server: Server) -> EngineStandby:
    """Through its endpoints."""
    return EngineStandby(CommandSleep(ServerSleep(f"http://127.0.0.1:{server.port}", lambda: "m")))


async def test_a_vllm_serve_sleeps_and_wakes_at_both_levels(server: Server) -> None:
    standby = standby_of(server)
    await standby.rehearse()
    for level in (1, 2):
        server.cached = True
        await standby.sleep(level)
        assert server.level == level
        await standby.wake()
        assert (server.asleep, server.loaded, server.cached) == (set(), True, False)


async def test_a_server_that_answers_otherwise_after_a_wake_is_found(server: Server) -> None:
    standby = standby_of(server)
    await standby.rehearse()
    await standby.sleep(1)
    server.loaded = False
    with pytest.raises(WakeCorrupted, match="after wake 2"):
        await standby.wake()


async def test_a_server_without_the_endpoints_says_which_is_missing(server: Server) -> None:
    bare = ServerSleep(f"http://127.0.0.1:{server.port}/none", lambda: None)
    with pytest.raises(EngineError, match=r"/none/sleep.level=1 answers 404"):
        await bare.sleep(1)
