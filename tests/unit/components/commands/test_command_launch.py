"""From a section to what is started: words, environment, ports."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.components.commands.child import Child
from dynamo_local.components.commands.dynamo_1x_env import DEFAULTS
from dynamo_local.components.commands.launch import Launch, prepare
from dynamo_local.components.commands.ports import PORTS, Ports
from dynamo_local.errors import ConfigError

ENV = {
    "PATH": "/usr/bin",
    "DYN_NAMESPACE": "dynamo",
    "DYN_WATCHER_NAME": "dynamo_W",
    "DYN_RUN_ID": "run",
    "DYNAMO_SERVICE_CONFIG": '{"Other": {"api-key": "secret"}}',
}


def launched(env: Mapping[str, str] = ENV, **section: Any) -> Launch:
    """What a section becomes; its ports are given back at once."""
    launch, ports = prepare(section, env)
    ports.close()
    return launch


def test_a_process_gets_its_words_and_the_environment_of_its_worker() -> None:
    launch = launched(command="serve --at {port:http} --in {namespace} --as {watcher}")
    port = launch.ports["http"]
    assert port in PORTS
    assert launch.argv == ("serve", "--at", str(port), "--in", "dynamo", "--as", "dynamo_W")
    assert launch.env["DYN_RUN_ID"] == "run"
    assert not any(name in launch.env for name in DEFAULTS)


def test_other_services_options_and_our_token_are_not_passed_on(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hidden\n")
    env = {**ENV, "DYN_NATS_TOKEN_FILE": str(tmp_path / "token")}
    launch = launched(env, command="serve")
    assert not {"DYNAMO_SERVICE_CONFIG", "DYN_NATS_TOKEN_FILE", "NATS_AUTH_TOKEN"} & launch.env.keys()


def test_programs_are_looked_for_beside_our_python_first() -> None:
    assert launched(command="serve").env["PATH"] == f"{os.path.dirname(sys.executable)}:/usr/bin"


def test_a_dynamo_worker_gets_ports_of_its_own_and_loopback_hosts(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hidden\n")
    env = {**ENV, "DYN_NATS_TOKEN_FILE": str(tmp_path / "token"), "DYN_SYSTEM_PORT": "1"}
    launch = launched(env, command="serve", runtime="dynamo-1x", role="decode")
    assert launch.env["DYN_SYSTEM_PORT"] == str(launch.ports["system"]) != "1"
    assert launch.env["DYN_TCP_RPC_PORT"] == str(launch.ports["rpc"])
    assert launch.env["NATS_AUTH_TOKEN"] == "hidden"
    assert DEFAULTS.items() <= launch.env.items()
    assert "DYN_HTTP_PORT" not in launch.env


def test_a_dynamo_worker_gets_certificates_as_text(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("-----BEGIN PRIVATE KEY-----\n")
    path = str(tmp_path / "key.pem")
    env = {**ENV, "ETCD_AUTH_CLIENT_KEY": path, "ETCD_AUTH_CA": "-----BEGIN CA", "NATS_TLS_CLIENT_KEY_PATH": path}
    launch = launched(env, command="serve", runtime="dynamo-1x")
    assert launch.env["ETCD_AUTH_CLIENT_KEY"] == "-----BEGIN PRIVATE KEY-----\n"
    assert launch.env["ETCD_AUTH_CA"] == "-----BEGIN CA"
    assert launch.env["NATS_TLS_CLIENT_KEY_PATH"] == path


def test_a_services_own_envs_win_over_our_defaults() -> None:
    launch = launched({**ENV, "DYN_EVENT_PLANE": "zmq"}, command="serve", runtime="dynamo-1x")
    assert launch.env["DYN_EVENT_PLANE"] == "zmq"


def test_a_dynamo_frontend_listens_where_we_say() -> None:
    launch = launched(command="serve", runtime="dynamo-1x", role="frontend", ports={"http": 0})
    assert launch.env["DYN_HTTP_PORT"] == str(launch.ports["http"])


def test_two_workers_never_get_one_port() -> None:
    first = Ports("dynamo_W", ["a", "b"], {})
    second = Ports("dynamo_W", ["a", "b"], {})
    try:
        assert len({*first.numbers.values(), *second.numbers.values()}) == 4
    finally:
        first.close()
        second.close()


def test_a_fixed_port_that_is_in_use_is_refused_by_its_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} \(http\) is in use"):
            Ports("dynamo_W", ["http"], {"http": port})


def test_a_fixed_port_is_held_against_other_workers() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    held = Ports("dynamo_W", ["http"], {"http": port})
    try:
        with pytest.raises(ConfigError, match="leased to another worker"):
            Ports("dynamo_V", ["http"], {"http": port})
    finally:
        held.close()
    Ports("dynamo_V", ["http"], {"http": port}).close()


def launch_of(*argv: str) -> Launch:
    """Of a program that stands by itself."""
    return Launch(argv, {"PATH": os.environ["PATH"]}, {})


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no program 'no-such-thing'"):
        Child(launch_of("no-such-thing", "--x"))


async def test_a_child_that_minds_sigterm_ends_with_its_own_code() -> None:
    child = Child(launch_of("sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done"))
    code = await child.end(10.0)
    assert code in (7, -signal.SIGTERM)  # the second: it had not set its trap yet
    assert await child.wait() == code


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "ready"
    child = Child(launch_of("sh", "-c", f"trap '' TERM; echo > {mark}; while :; do sleep 0.05; done"))
    async with asyncio.timeout(10.0):
        while not mark.exists():
            await asyncio.sleep(0.01)
    assert await child.end(0.1) == -signal.SIGKILL


async def test_a_child_has_no_input_none_of_our_files_and_the_signals_of_any_program(tmp_path: Path) -> None:
    """Python ignores SIGPIPE, and a GPU's lock that is inherited would outlive its worker."""
    told = tmp_path / "told"
    script = f"readlink /proc/$$/fd/0 > {told}; ls /proc/$$/fd >> {told}; grep SigIgn /proc/$$/status >> {told}"
    with open(os.devnull, "rb") as ours:
        os.set_inheritable(ours.fileno(), True)
        child = Child(launch_of("bash", "-c", script))
        assert await child.wait() == 0
    stdin, *fds, ignored = told.read_text().splitlines()
    assert stdin == os.devnull
    assert set(fds) <= {"0", "1", "2", "255"}  # the last is bash's own
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_a_program_that_cannot_be_run_is_an_error_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    with pytest.raises(PermissionError, match="data"):
        Child(launch_of(str(tmp_path / "data")))


def test_a_child_dies_with_its_runner() -> None:
    program = (
        "import os, signal\n"
        "from dynamo_local.components.commands.child import Child\n"
        "from dynamo_local.components.commands.launch import Launch\n"
        "child = Child(Launch(('sleep', '60'), {'PATH': os.environ['PATH']}, {}))\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    pid = int(done.stdout)
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], 10.0)[0], f"{pid} lives on"
    os.close(fd)
