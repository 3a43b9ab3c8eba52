"""`dynamo serve` as a user runs it: a real arbiter with real etcd, NATS and worker processes, in folders of its own.

    with Served() as served:          # the shipped disaggregated graph on eight simulated GPUs
        served.start()
        served.status(), served.url, served.etcdctl("get", "--prefix", "dynamo/")

Leaving the block takes the graph down and asserts that nothing is left: no process, file, socket or shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from openai import AsyncOpenAI

from dynamo_local.cli.common import ask_arbiter
from dynamo_local.components.text.tokenizer import Tokenizer, load_tokenizer
from dynamo_local.engines.sim.tokens import expected_output
from dynamo_local.errors import DynamoError
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import is_alive, is_resource_tracker
from tests.drivers import host_facts
from tests.drivers.servers import Registry
from tests.tools.answers import checked, read_answer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "llm"
MODEL = "sim-tiny"
COMMAND_TIMEOUT_S = 60.0
START_TIMEOUT_S = 90.0
"""Six processes that all import, or leave, on a machine that may do something else."""
POLL_S = 0.02
LATER_POLL_S = 0.06
"""After a second of waiting: to ask an arbiter takes 4 ms of processor time, its and ours: a seventh of a core."""
TRACKERS_S = 5.0

DISAGG = ("graphs.disagg:Frontend", "-f", "configs/disagg.yaml")
AGG = ("graphs.agg:Frontend", "-f", "configs/agg.yaml")
AGG_ROUTER = ("graphs.agg_router:Frontend", "-f", "configs/agg_router.yaml")
DISAGG_ROUTER = ("graphs.disagg_router:Frontend", "-f", "configs/disagg_router.yaml")

T = TypeVar("T")


class Served(Registry):
    """One namespace on this host. `words` follow `dynamo serve`; the `frontend`, if there is one, takes any free port.

    `behind`: words after `--`. `files` (relative name -> text) make a working folder of its own instead of `cwd`.
    """

    def __init__(
        self,
        *words: str,
        target: Sequence[str] = DISAGG,
        namespace: str = "dynamo",
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        cwd: Path = EXAMPLE,
        beside: Served | None = None,
        frontend: bool = True,
        timeout_s: float = COMMAND_TIMEOUT_S,
        behind: Sequence[str] = (),
    ) -> None:
        self.timeout_s = timeout_s
        self._behind = ("--", *behind) if behind else ()
        self._own_folder = beside is None
        # Short: a unix socket's path has 107 bytes, and pytest's folders alone have 80.
        self.folder = beside.folder if beside else Path(tempfile.mkdtemp(prefix="dl-"))
        self.namespace = namespace
        self.cwd = cwd if files is None else self.folder / "app"
        for name, text in (files or {}).items():
            path = self.cwd / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        home, runtime = self.folder / "home", self.folder / "run"
        home.mkdir(exist_ok=True)
        runtime.mkdir(mode=0o700, exist_ok=True)
        self.env = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(runtime),
            "PYTHONDONTWRITEBYTECODE": "1",
            # A checkout that is not the installed one (a git worktree) is tested by its own code.
            **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
            **(env or {}),
        }
        self._words = (*target, *words, *(("--Frontend.port=0",) if frontend else ()))
        self.paths = Paths.of(namespace, self.env)
        self._shared_memory = host_facts.shared_memory()
        self._foreground: subprocess.Popen[str] | None = None

    def cli(
        self, *words: str, timeout_s: float | None = None, env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `dynamo WORDS` to its end; in a shell with these variables alone, if `env` is given.

        The answer of `--json` must be as its schema says.
        """
        done = subprocess.run(
            [sys.executable, "-m", "dynamo_local.cli.main", *words],
            cwd=self.cwd,
            env=self.env if env is None else env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.timeout_s if timeout_s is None else timeout_s,
            check=False,
            **popen,
        )
        if "--json" in words and done.stdout:
            read_answer(words, done.stdout)
        return done

    def serve_words(self, *more: str) -> tuple[str, ...]:
        namespace = () if self.namespace == "dynamo" else ("--namespace", self.namespace)
        return ("serve", *self._words, *namespace, *more, *self._behind)

    def serve_with(self, file: str) -> None:
        self._words = (*(word for word in self._words if word != "-f" and not word.endswith(".yaml")), "-f", file)

    def start(self) -> Self:
        """`dynamo serve … --detach`, which must succeed."""
        done = self.cli(*self.serve_words("--detach"), timeout_s=max(START_TIMEOUT_S, self.timeout_s))
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return self

    @contextmanager
    def started(self) -> Iterator[Self]:
        """The ready graph, until the end of the block."""
        with self:
            yield self.start()

    def ok(self, *words: str, **more: Any) -> str:
        done = self.cli(*words, **more)
        assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def kill_arbiter(self, *, guardian: bool = False) -> None:
        """SIGKILL it, and the guardian first if asked to. Its workers serve on where the policy is `keep`."""
        status = self.status()
        if guardian:
            os.kill(status["guardian_pid"], signal.SIGSTOP)
        os.kill(status["arbiter_pid"], signal.SIGKILL)
        if guardian:
            os.kill(status["guardian_pid"], signal.SIGKILL)
        until(lambda: not is_alive(status["arbiter_pid"]))

    def adopt(self, *words: str) -> None:
        """`dynamo serve … --adopt --detach`, which must succeed."""
        done = self.cli(*self.serve_words("--adopt", "--detach", *words), timeout_s=START_TIMEOUT_S)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"

    def popen(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """`dynamo WORDS` in a session of its own; its output goes to `foreground_output`."""
        assert self._foreground is None or self._foreground.poll() is not None, "one at a time"
        with self._output_file.open("w") as output:
            self._foreground = subprocess.Popen(
                [sys.executable, "-m", "dynamo_local.cli.main", *words],
                cwd=self.cwd,
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        return self._foreground

    def start_foreground(self, **env: str) -> subprocess.Popen[str]:
        process = self.popen(*self.serve_words(), **env)
        until(lambda: process.poll() is not None or self._is_ready(), START_TIMEOUT_S, what=self.foreground_output)
        assert process.poll() is None, self.foreground_output()
        return process

    def _is_ready(self) -> bool:
        try:
            return self.paths.control_socket.exists() and self.status()["state"] == "ready"
        except DynamoError:
            return False

    @property
    def _output_file(self) -> Path:
        return self.folder / "foreground.txt"

    def foreground_output(self) -> str:
        """The output of `popen`'s process so far, stdout and stderr together."""
        return self._output_file.read_text()

    def down(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`dynamo down`, which must succeed; where it does not end, it says who is left."""
        words = ("down", "--timeout", f"{START_TIMEOUT_S:g}", "--namespace", self.namespace, *words)
        done = self.cli(*words, timeout_s=START_TIMEOUT_S + self.timeout_s)
        assert not done.returncode, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.cli_status()}"
        return done

    def cli_status(self) -> dict[str, Any]:
        """`dynamo status --json`; empty where it fails."""
        done = self.cli("status", "--json", "--namespace", self.namespace)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def status(self) -> dict[str, Any]:
        """The object of `dynamo status --json`, asked without starting a process."""
        graph: dict[str, Any] = ask_arbiter(self.paths, "dynamo_status")["graph"]
        return graph

    def _check_status(self) -> None:
        """The last status, with all that the test did, is as its schema says."""
        try:
            status = self.status()
        except DynamoError:  # it is leaving
            return
        checked("status", status)

    def worker(self, name: str) -> dict[str, Any]:
        """One worker's part of the status, by its name without the namespace."""
        return next(w for w in self.status()["workers"] if w["watcher_name"] == f"{self.namespace}_{name}")

    def states(self) -> dict[str, str]:
        return {w["watcher_name"].removeprefix(f"{self.namespace}_"): w["state"] for w in self.status()["workers"]}

    def pids(self) -> dict[str, int]:
        """Watcher name without namespace -> pid, of all workers that run."""
        workers = self.status()["workers"]
        return {w["watcher_name"].removeprefix(f"{self.namespace}_"): w["pid"] for w in workers if w["pid"]}

    def server_pid(self, name: str) -> int | None:
        """The pid of the embedded `etcd` or `nats`, as circus knows it."""
        answer = ask_arbiter(self.paths, "list", name=f"{self.namespace}_{name}")
        return next(iter(answer["pids"]), None)

    @property
    def url(self) -> str:
        return str(self.status()["frontend_url"])

    def statefile(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.paths.statefile.read_text())
        return content

    def log(self, name: str) -> str:
        """The log of one process, by its name without the namespace."""
        return self.paths.log_file(f"{self.namespace}_{name}").read_text()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncOpenAI]:
        """The `openai` package's client, without its retries: a test wants to see what happened."""
        async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0) as client:
            yield client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if self.paths.control_socket.exists():
                    self._check_status()
                    self.down()
                self.reap_foreground()
                assert (left := self.leftovers()) == [], left
            else:
                self._add_logs(error)
        finally:
            self._kill_everything()
            if self._own_folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    def reap_foreground(self, timeout_s: float = COMMAND_TIMEOUT_S) -> int | None:
        """The exit code of `popen`'s process, once it has ended; None if there was none."""
        return None if self._foreground is None else self._foreground.wait(timeout_s)

    def leftovers(self) -> list[str]:
        """Processes, files, sockets and shared memory of ours that are left. Logs and lock files may stay."""
        found = [f"process {pid}: {line}" for pid, line in self.processes()]
        found += [f"statefile {self.paths.statefile}"] if self.paths.statefile.exists() else []
        found += [f"runtime folder {self.paths.runtime}"] if self.paths.runtime.exists() else []
        mine = [self.paths.runtime] if not self._own_folder else [self.folder]
        found += [f"socket {path}" for folder in mine for path in host_facts.sockets(folder)]
        found += [f"shared memory {name}" for name in self.shared_memory()]
        return found

    def shared_memory(self) -> set[str]:
        """New names in /dev/shm since this graph began, without those that other users' processes map."""
        found = host_facts.shared_memory() - self._shared_memory
        if not found:
            return found
        mine = {pid for pid, _ in self.processes()}
        theirs = {
            inode for pid in host_facts.pids() if pid not in mine for inode in host_facts.mapped_shared_memory(pid)
        }
        return {name for name in found if host_facts.inode(Path("/dev/shm", name)) not in (None, *theirs)}

    def processes(self) -> list[tuple[int, str]]:
        """`(pid, command line)` of every live process that our folder's name gives away.

        Of one namespace where the folder is shared: what names that namespace's files.
        """
        mark = os.fsencode(self.folder if self._own_folder else self.paths.runtime)
        marks = {mark, os.fsencode(self.paths.statefile)}
        found = []
        for pid in host_facts.pids():
            about = host_facts.about(pid)
            if pid != os.getpid() and any(mark in about for mark in marks):
                found.append((pid, host_facts.about(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace")))
        return found

    def pids_of(self, word: str) -> list[int]:
        """Pids of our live processes on whose command line the word is."""
        return [pid for pid, line in self.processes() if word in line]

    def _kill_everything(self) -> None:
        # Resource trackers end by themselves, when they have cleared /dev/shm of what the others left there.
        kill_processes(pid for pid, _ in self.processes() if not is_resource_tracker(pid))
        if self._foreground is not None:
            self._foreground.kill()
            self._foreground.wait()
        try:
            until(lambda: not self.processes(), TRACKERS_S, what=self.processes)
        except AssertionError:
            kill_processes(pid for pid, _ in self.processes())
            until(lambda: not self.processes(), what=self.processes)

    def _add_logs(self, error: BaseException) -> None:
        for path in sorted(self.paths.logs.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            if not path.stem.endswith(("_etcd", "_nats")):
                error.add_note(f"--- {path.name}\n" + "\n".join(lines))


def kill_processes(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], T], timeout_s: float = 30.0, *, what: Callable[[], object] | str = "") -> T:
    """Wait for a condition and return its value; past the deadline an AssertionError with `what` was instead."""
    began_s = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(POLL_S if waited_s < 1.0 else LATER_POLL_S)
    return value


async def auntil(condition: Callable[[], T], timeout_s: float = 30.0, *, what: Callable[[], object] | str = "") -> T:
    return await asyncio.to_thread(until, condition, timeout_s, what=what)


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def expected(prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> tuple[str, str]:
    """`(text, finish_reason)` that the simulated engine gives to a chat of that one message: the oracle."""
    ids = tokenizer().encode_chat(messages(prompt))
    tokens, reason = expected_output(ids, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return tokenizer().decode(tokens), reason


def asking(prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> dict[str, Any]:
    extra = {"extra_body": {"ignore_eos": True}} if ignore_eos else {}
    return {"model": MODEL, "messages": messages(prompt), "max_tokens": max_tokens, **extra}


async def stream_chat(
    client: AsyncOpenAI, prompt: str, max_tokens: int, *, ignore_eos: bool = False, started: asyncio.Event | None = None
) -> tuple[str, str | None]:
    """`(text, finish_reason)` of one streamed chat; sets `started` at its first text."""
    text, reason = "", None
    stream = await client.chat.completions.create(**asking(prompt, max_tokens, ignore_eos=ignore_eos), stream=True)
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                if text and started is not None:
                    started.set()
    return text, reason
