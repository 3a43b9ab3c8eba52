"""Tests what the vLLM engine counts, and what it holds for itself on a host; without vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.engines.vllm import engine_resources, plugin
from dynamo_local.engines.vllm.engine import Handoffs, Statistics


def scheduler(running: int = 0, usage: float = 0.0, prefix: tuple[int, int, int] | None = None) -> Any:
    hits = None if prefix is None else SimpleNamespace(requests=prefix[0], queries=prefix[1], hits=prefix[2])
    return SimpleNamespace(num_running_reqs=running, kv_cache_usage=usage, prefix_cache_stats=hits)


def test_load_under_dynamos_names() -> None:
    """What vLLM has not yet taken up waits; the rest follows its own statistics."""
    statistics = Statistics(slots=16, blocks=300)
    for name in "abc":
        statistics.opened(name, 100)
    statistics.record(scheduler(running=2, usage=0.5, prefix=(2, 200, 50)), None)
    statistics.produced("a", 1, 10.0)
    statistics.produced("a", 4, 10.2)
    load = statistics.load(0)
    assert (load.request_active_slots, load.num_requests_waiting, load.request_total_slots) == (2, 1, 16)
    assert (load.kv_active_blocks, load.kv_total_blocks, load.gpu_cache_usage_perc) == (150, 300, 0.5)
    assert load.gpu_prefix_cache_hit_rate == 0.25
    assert load.remaining_tokens == 95 + 200
    assert load.itl_ms == pytest.approx(50.0)


def test_an_engine_without_work_uses_nothing() -> None:
    """After the last abort there is no pass, so its last word is out of date; KV that is held for others does count."""
    statistics = Statistics(slots=16, blocks=300)
    statistics.opened("a", 10)
    statistics.record(scheduler(running=1, usage=0.3), None)
    statistics.closed("a")
    assert statistics.load(0).gpu_cache_usage_perc == 0.0
    assert statistics.load(1).gpu_cache_usage_perc == 0.3
    assert statistics.load(1).request_active_slots == 0


def test_the_hit_rate_forgets() -> None:
    statistics = Statistics(1, 1)
    statistics.record(scheduler(prefix=(1000, 1000, 1000)), None)
    statistics.record(scheduler(prefix=(500, 1000, 0)), None)
    assert statistics.load(0).gpu_prefix_cache_hit_rate == 0.0


def test_prompt_tokens_are_counted_by_source() -> None:
    statistics = Statistics(1, 1)
    tokens = SimpleNamespace(computed=1, local_cache_hit=2, external_kv_transfer=30)
    for _ in range(2):
        statistics.record(None, SimpleNamespace(prompt_token_stats=tokens))
    assert statistics.prompt_tokens == {"local_compute": 2, "local_cache_hit": 4, "external_kv_transfer": 60}


def test_handed_over_kv_is_held_until_it_was_pulled() -> None:
    handoffs = Handoffs(30.0)
    handoffs.add(kv("a"), 100.0)
    handoffs.observe(scheduler(usage=0.0), num_live=1)
    handoffs.observe(scheduler(usage=0.1), num_live=0)
    handoffs.observe(None, num_live=0)
    assert handoffs.num_held(101.0) == 1
    handoffs.observe(scheduler(usage=0.0), num_live=0)
    assert (handoffs.num_held(101.0), handoffs.seconds_left(101.0)) == (0, 0.0)


def test_handed_over_kv_that_nobody_pulls_ends_with_its_lease() -> None:
    handoffs = Handoffs(30.0)
    handoffs.add(kv("a"), 100.0)
    handoffs.add(kv("b"), 110.0)
    assert (handoffs.num_held(159.9), handoffs.num_held(160.0), handoffs.num_held(170.0)) == (2, 1, 0)
    handoffs.add(kv("c"), 200.0)
    assert handoffs.seconds_left(210.0) == pytest.approx(50.0)


def test_handed_over_kv_that_nobody_wants_is_not_waited_for() -> None:
    handoffs = Handoffs(30.0)
    for n, name in enumerate("ab"):
        handoffs.add(kv(name), 100.0 + n)
    handoffs.forget(kv("b"))
    handoffs.forget(kv("unknown"))
    assert (handoffs.num_held(101.0), handoffs.seconds_left(101.0)) == (1, pytest.approx(59.0))


def kv(request_id: str) -> dict[str, str]:
    """What a decode engine gets, as far as it matters here."""
    return {"remote_request_id": request_id}


def test_eight_engines_have_nothing_in_common(short_folder: Path) -> None:
    taken = []
    try:
        for n in range(8):
            environ = {"HOME": str(short_folder), "DYN_WORKER_FOLDER": str(short_folder / "w" / str(n))}
            taken.append(engine_resources.take("VllmWorker", environ))
        ports = [mine.port for mine in taken]
        assert all(abs(a - b) >= engine_resources.PORTS_PER_ENGINE for a in ports for b in ports if a != b)
        assert len(set(ports)) == 8
        assert set(ports) <= set(engine_resources.PORTS)
        for name in ("VLLM_CACHE_ROOT", "VLLM_RPC_BASE_PATH", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
            assert len({mine.environment[name] for mine in taken}) == 8, name
    finally:
        for mine in taken:
            mine.close()
    assert [path for path in (short_folder / "w").iterdir()] == []
    again = engine_resources.take(
        "VllmWorker", {"HOME": str(short_folder), "DYN_WORKER_FOLDER": str(short_folder / "w" / "0")}
    )
    again.close()
    assert again.environment["VLLM_CACHE_ROOT"] == taken[0].environment["VLLM_CACHE_ROOT"], "the cache is found again"


def test_a_lease_ends_with_its_process() -> None:
    code = (
        "import sys\nfrom dynamo_local.system.host_leases import lease\nheld = lease('test/ends')\n"
        "print(held is not None, flush=True)\nsys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "True\n"
    assert engine_resources.lease("test/ends") is None
    child.kill()
    child.communicate()
    held = engine_resources.lease("test/ends")
    assert held is not None
    held.close()


def test_a_long_runtime_folder_moves_the_sockets_elsewhere(tmp_path: Path) -> None:
    """The kernel would cut their paths."""
    deep = tmp_path / ("x" * 80)
    mine = engine_resources.take("VllmWorker", {"HOME": str(tmp_path), "DYN_WORKER_FOLDER": str(deep)})
    try:
        assert len(mine.environment["VLLM_RPC_BASE_PATH"]) < 60
        assert mine.folder.is_dir()
    finally:
        mine.close()
    assert not mine.folder.exists()


def test_an_engines_process_ends_with_its_worker() -> None:
    engine = (
        "from dynamo_local.engines.vllm import plugin\nplugin.register()\n"
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )
    worker = (
        "import os, subprocess, sys\n"
        f"env = {{**os.environ, {plugin.WORKER_PID!r}: str(os.getpid())}}\n"
        f"subprocess.run([sys.executable, '-c', {engine!r}], env=env)"
    )
    child = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    engine_pid = int(child.stdout.readline())
    fd = os.pidfd_open(engine_pid)
    try:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert _ended(fd, 5.0)
    finally:
        os.close(fd)
        child.stdout.close()


def _ended(fd: int, timeout_s: float) -> bool:
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def test_outside_of_a_worker_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's own `vllm serve` on a host with dynamo-local installed."""
    monkeypatch.delenv(plugin.WORKER_PID, raising=False)
    plugin.register()
    monkeypatch.setenv(plugin.WORKER_PID, str(os.getpid()))
    plugin.register()
    assert "parent watch" not in {thread.name for thread in threading.enumerate()}


def test_what_one_worker_compiled_the_next_finds(short_folder: Path) -> None:
    """Whole files alone, as vLLM names them; what it writes anew in one folder is not seen in the other."""
    environ = {"HOME": str(short_folder)}
    graph, infos = Path("torch_compile_cache/torch_aot_compile/abc/rank_0_0"), Path("modelinfos")
    with contextlib.ExitStack() as stack:
        first = engine_resources.take("VllmWorker", environ)
        stack.callback(first.close)
        cache = Path(first.environment["VLLM_CACHE_ROOT"])
        for folder in (graph, infos):
            (cache / folder).mkdir(parents=True, exist_ok=True)
        (cache / graph / "model").write_text("compiled")
        (cache / graph / "model.77.tmp").write_text("half of it")
        (cache / infos / "llama.json").write_text("{}")
        second = engine_resources.take("PrefillWorker_1", environ)
        stack.callback(second.close)
        other = Path(second.environment["VLLM_CACHE_ROOT"])
        assert other != cache
        found = {file.relative_to(other).as_posix() for file in other.rglob("*") if file.is_file()}
        assert found == {f"{graph}/model", f"{infos}/llama.json"}
        (other / "new").write_text("compiled again")
        (other / "new").replace(other / graph / "model")
        assert (cache / graph / "model").read_text() == "compiled"
