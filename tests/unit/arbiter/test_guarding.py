"""The guardian's own parts: its file, command line and environment, the policies in the statefile, the GPUs' locks."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from circus.plugins import _str2cfg

from dynamo_local.arbiter.adoption import Found, ServeSettings, check_same, hold_gpus
from dynamo_local.arbiter.guard import environment, guardian_argv
from dynamo_local.arbiter.guarded_run import OPTION, GuardedRun
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.types import GraphSpec, ServiceSpec
from dynamo_local.errors import ConfigError, GpuError, NamespaceBusy
from dynamo_local.state.schema import ComponentEntry, Environment, ServerEntry, State
from dynamo_local.system import liveness as lock
from dynamo_local.system.gpu_locks import GpuLocked, GpuLocks
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.gpus import SimInventory
from dynamo_local.system.paths import Paths

RUN = "01JD3YQZ8E6W4T1V0K2M5N7P9R"
GRAPH = GraphSpec("test", "app:W", (ServiceSpec("W", role="other"),))  # type: ignore[arg-type]
ETCD, NATS = "http://127.0.0.1:1", "nats://127.0.0.1:2"


def test_a_ward_is_read_as_it_was_written(tmp_path: Path) -> None:
    guarded = GuardedRun("test", RUN, "/run/x", "/state/test.json", "/logs", 17, 12.34, True, ("/run/x/nats/token",))
    path = tmp_path / "guardian.json"
    guarded.write(path)
    assert GuardedRun.read(path) == guarded
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["guardian.json"]


def test_its_command_line_survives_circus_and_a_shell() -> None:
    """options travel through an unquoted command line; ours is one path without spaces."""
    paths = Paths.of("test", {"XDG_RUNTIME_DIR": "/run/user/0", "HOME": "/root"})
    argv = guardian_argv(paths, Path("/run/user/0/dynamo/test/guardian.json"))
    config = _str2cfg(argv[argv.index("--config") + 1])
    assert config == {OPTION: "/run/user/0/dynamo/test/guardian.json"}
    assert shlex.split(" ".join(argv[3:])) == list(argv[3:])


def test_its_environment_has_no_secret_and_nothing_for_a_worker() -> None:
    """`circusctl options` prints it."""
    given = {"PATH": "/bin", "PYTHONPATH": "/x", "LC_ALL": "C", "HF_TOKEN": "hush", "CUDA_VISIBLE_DEVICES": "1"}
    assert environment(given) == {"PATH": "/bin", "PYTHONPATH": "/x", "LC_ALL": "C"}


def test_a_guardian_at_work_is_waited_for(tmp_path: Path) -> None:
    """A new `serve` gets the namespace when the guardian is done, and is refused by anybody else at once."""
    path = tmp_path / "test.lock"
    held = lock.acquire(path, "test", lock.GUARDIAN)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(lock.acquire, path, "test", "`dynamo serve`")
        with pytest.raises(TimeoutError):
            waiting.result(2 * lock.PROBED_S)
        lock.release(held)
        theirs = waiting.result(5.0)
        with pytest.raises(NamespaceBusy, match="dynamo serve"):
            lock.acquire(path, "test", lock.GUARDIAN)
        other.submit(lock.release, theirs).result(5.0)


def test_a_child_whose_parent_is_dead_already_ends_at_once() -> None:
    code = (
        "import signal, os\n"
        "from dynamo_local.system.prctl import set_parent_death_signal\n"
        "set_parent_death_signal(signal.SIGKILL, os.getppid())\n"
        "set_parent_death_signal(signal.SIGKILL, 1 << 22)\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


# --- the statefile -------------------------------------------------------------------------------


def state(**more: Any) -> State:
    """A run of one worker with embedded servers."""
    return State(
        namespace="test",
        run_id=RUN,
        target="app:W",
        gpus="all",
        etcd_endpoints=ETCD,
        nats_server=NATS,
        servers={
            "test_etcd": ServerEntry(kind="etcd", binary="/bin/etcd", ports=[1, 2], pid=7, pid_start_time=1.5),
            "test_nats": ServerEntry(kind="nats", binary="/bin/nats-server", ports=[2]),
        },
        on_arbiter_death="keep",
        components={"test_W": ComponentEntry(watcher_name="test_W", component="W", cwd="/app", course="restarting")},
        environment=Environment(DYNAMO_SERVICE_CONFIG='{"W": {"colour": "red", "size": 1}}'),
        **more,
    )


def test_servers_policy_and_course_are_kept_and_absent_where_there_are_none() -> None:
    text = state().model_dump_json()
    assert State.model_validate_json(text) == state()
    assert {"servers", "on_arbiter_death"} <= json.loads(text).keys()
    assert not {"servers", "on_arbiter_death"} & json.loads(State(namespace="n", run_id=RUN).model_dump_json()).keys()


def wish(**changes: Any) -> ServeSettings:
    """The command line that started it."""
    same: dict[str, Any] = {
        "graph": GRAPH,
        "cwd": Path("/app"),
        "gpus_option": "all",
        "config_json": '{"W": {"size": 1, "colour": "red"}}',
        "etcd_endpoints": None,
        "nats_server": None,
    }
    return ServeSettings(**{**same, **changes})


def test_the_same_command_line_may_adopt() -> None:
    """The order of keys is no difference, nor an embedded server's own address, nor credentials: those are not kept."""
    check_same(Found(state(), {}), wish())
    check_same(Found(state(), {}), wish(etcd_endpoints=ETCD))
    check_same(Found(state(), {}), wish(nats_server="nats://secret@127.0.0.1:2"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"graph": GraphSpec("test", "app:V", GRAPH.services)}, "the graph is app:W, not app:V"),
        ({"graph": GraphSpec("test", "app:W", ())}, "the graph has no W"),
        ({"cwd": Path("/elsewhere")}, "test_W's folder is /app, not /elsewhere"),
        ({"gpus_option": "0"}, "--gpus is all, not 0"),
        ({"config_json": '{"W": {"colour": "blue", "size": 2}}'}, "the configuration differs in W.colour, W.size"),
        ({"config_json": '{"W": {"colour": "red", "size": 1}, "V": {"a": 1}}'}, "differs in V.a"),
        ({"etcd_endpoints": "http://other:1"}, "etcd is http://127.0.0.1:1, not http://other:1"),
        ({"nats_server": "nats://other:1"}, "nats is nats://127.0.0.1:2, not nats://other:1"),
        ({"nats_server": "nats://secret@other:1"}, "nats is nats://127.0.0.1:2, not nats://other:1"),
    ],
)
def test_another_command_line_may_not(changes: dict[str, Any], named: str) -> None:
    """Each difference is named: the adopted workers would go on with what they have."""
    with pytest.raises(ConfigError) as refused:
        check_same(Found(state(), {}), wish(**changes))
    assert named in str(refused.value)


# --- GPUs ----------------------------------------------------------------------------------------


def pool(folder: Path, namespace: str = "test") -> GpuPool:
    """Eight simulated devices with real locks."""
    return GpuPool(namespace, SimInventory(8), GpuLocks(folder))


def ledger_of(pool: GpuPool) -> GpuLedger:
    """What the pool sees, as a new arbiter begins with it."""
    sample = pool.sample()
    return GpuLedger.of(sample.devices, elsewhere=sample.elsewhere)


def held_by(uuids: Sequence[str], *, living: bool) -> Found:
    """A run whose one worker holds these."""
    found = Found(state(), {"test_W": 4711} if living else {})
    found.state.components["test_W"].resources.gpu_uuids = list(uuids)
    return found


def test_an_adopted_workers_gpus_are_its_own_without_our_lock(tmp_path: Path) -> None:
    """counted as held, not handed out; the lock is the worker's until it is gone, and ours then."""
    before, after = pool(tmp_path), pool(tmp_path)
    uuids = [device.uuid for device in ledger_of(before).devices[:2]]
    before.lock("test_W", uuids)  # stands for the worker, which inherited the locks
    try:
        ledger = hold_gpus(held_by(uuids, living=True), ledger_of(after), after)
        assert ledger.held_uuids == {"test_W": tuple(uuids)}
        assert after.inherited_fds(uuids) == []
        with pytest.raises(GpuLocked):  # it lives
            after.lock("test_W", uuids)
        ledger = ledger.allocate("test_W_1", 6)
        assert not set(uuids) & set(ledger.held_uuids["test_W_1"])

        before.close()
        assert after.lock("test_W", uuids) == tuple(uuids)
        assert len(after.inherited_fds(uuids)) == 3, "two locks, and their folder"
    finally:
        before.close()
        after.close()


def test_a_dead_workers_gpus_are_locked_for_it_again(tmp_path: Path) -> None:
    ours = pool(tmp_path)
    try:
        uuids = [device.uuid for device in ledger_of(ours).devices[:2]]
        ledger = hold_gpus(held_by(uuids, living=False), ledger_of(ours), ours)
        assert ledger.held_uuids == {"test_W": tuple(uuids)}
        assert len(ours.inherited_fds(uuids)) == 3
    finally:
        ours.close()


def test_gpus_that_another_namespace_took_meanwhile_are_given_up(tmp_path: Path) -> None:
    stranger, ours = pool(tmp_path, "other"), pool(tmp_path)
    try:
        uuids = [ledger_of(stranger).devices[0].uuid]
        stranger.lock("other_W", uuids)
        ledger = hold_gpus(held_by(uuids, living=False), ledger_of(ours), ours)
        assert ledger.held == {}
        assert "namespace other" in ledger.taken[uuids[0]]
        with pytest.raises(GpuError, match="not on this host"):
            hold_gpus(held_by(["GPU-no-such-device"], living=False), ledger, ours)
    finally:
        stranger.close()
        ours.close()
