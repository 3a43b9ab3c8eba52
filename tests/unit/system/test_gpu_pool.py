"""A driver that hangs costs a thread and one deadline: decisions, and leaving, go on with the last inventory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.errors import GpuError
from dynamo_local.system import gpu_pool as pool_module
from dynamo_local.system.gpu_locks import GpuLocked, GpuLocks, LockHolder
from dynamo_local.system.gpu_pool import GpuPool, GpuSample
from dynamo_local.system.gpus import NvmlInventory
from tests.fakes.arbiter.nvml import FakeGpu, FakeNvmlLib, install

A, B = "GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-0000"
OTHERS = LockHolder("other", "other_W", 1)
DEADLINE_S = 0.1
LONG_S = 10.0


@pytest.fixture
def gpus() -> list[FakeGpu]:
    return [FakeGpu(A), FakeGpu(B)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, gpus: list[FakeGpu]) -> Iterator[FakeNvmlLib]:
    """libnvidia-ml; threads that hang in it are let go when the test ends."""
    fake = install(monkeypatch, gpus)
    yield fake
    fake.answers.set()


@pytest.fixture
def pool(nvml: FakeNvmlLib, tmp_path: Path) -> Iterator[GpuPool]:
    pool = GpuPool("test", NvmlInventory(), GpuLocks(tmp_path / "gpus"), sample_deadline_s=DEADLINE_S)
    pool.sample()
    yield pool
    pool.close()


async def answered(pool: GpuPool, nvml: FakeNvmlLib) -> GpuSample:
    nvml.answers.set()
    async with asyncio.timeout(LONG_S):
        while (sample := await pool.look()).stale is not None:
            await asyncio.sleep(0.005)
    return sample


# --- looking ---------------------------------------------------------------------------------------


async def test_a_look_shows_the_devices_and_who_else_has_them(pool: GpuPool, tmp_path: Path) -> None:
    others = GpuLocks(tmp_path / "gpus")
    others.acquire([A], OTHERS)
    pool.lock("test_W", [B])
    sample = await pool.look()
    assert [device.uuid for device in sample.devices] == [A, B]
    assert sample.elsewhere == {A: str(OTHERS)}
    assert sample.stale is None
    others.close()
    assert (await pool.look()).elsewhere == {}


async def test_where_nobody_asked_for_a_gpu_there_is_nothing_to_see(tmp_path: Path) -> None:
    pool = GpuPool("test", None, GpuLocks(tmp_path / "gpus"))
    assert pool.sample() == await pool.look() == GpuSample()
    assert pool.freshness().as_json() == {"age_s": None, "stale": None}
    pool.close()


@pytest.mark.timing
async def test_decisions_go_on_with_the_last_inventory_and_it_is_said(pool: GpuPool, nvml: FakeNvmlLib) -> None:
    assert pool.freshness().stale is None
    nvml.answers.clear()
    assert await pool.look() == GpuSample(stale="the GPU driver has not returned within 0.1 s")
    stale = pool.freshness()
    assert stale.stale == "the GPU driver has not returned within 0.1 s"
    assert stale.age_s is not None
    assert stale.age_s >= DEADLINE_S
    before_s = time.monotonic()
    assert all([(await pool.look()).stale for _ in range(100)])
    assert time.monotonic() - before_s < 100 * DEADLINE_S / 2, "each of them waited for the driver"
    assert len((await answered(pool, nvml)).devices) == 2
    assert pool.freshness().stale is None
    assert (pool.freshness().age_s or 0.0) < stale.age_s


async def test_the_default_executor_has_room_for_commits(pool: GpuPool, nvml: FakeNvmlLib) -> None:
    nvml.answers.clear()
    looks = [asyncio.create_task(pool.look()) for _ in range(64)]
    async with asyncio.timeout(LONG_S):
        assert await asyncio.to_thread(lambda: "committed") == "committed"
        assert all(sample.stale for sample in await asyncio.gather(*looks))


def test_a_pool_whose_driver_hangs_can_be_closed(
    pool: GpuPool, nvml: FakeNvmlLib, caplog: pytest.LogCaptureFixture
) -> None:
    """`dynamo down` ends with it."""
    nvml.answers.clear()
    asyncio.run(pool.look())
    pool.close()
    assert "NVML was not closed" in caplog.text


def test_a_driver_that_hangs_at_the_start_is_named(
    nvml: FakeNvmlLib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no inventory to go by yet: `dynamo serve` says so, and what to do."""
    monkeypatch.setattr(pool_module, "FIRST_SAMPLE_DEADLINE_S", 0.05)
    nvml.answers.clear()
    pool = GpuPool("test", NvmlInventory(), GpuLocks(tmp_path / "gpus"))
    with pytest.raises(GpuError, match=r"the GPU driver has not returned within 0\.05 s: .*nvidia-smi"):
        pool.sample()
    pool.close()


async def test_a_lock_taken_while_somebody_looked_is_not_taken_for_a_strangers(
    pool: GpuPool, nvml: FakeNvmlLib
) -> None:
    nvml.answers.clear()
    look = asyncio.create_task(pool.look())
    await asyncio.sleep(0)
    pool.lock("test_W", [A])
    nvml.answers.set()
    assert (await look).elsewhere == {}


async def test_a_lock_let_go_while_somebody_looked_is_not_taken_for_a_strangers(
    pool: GpuPool, nvml: FakeNvmlLib
) -> None:
    pool.lock("test_W", [A])
    nvml.answers.clear()
    look = asyncio.create_task(pool.look())
    await asyncio.sleep(0)
    pool.unlock([A])
    nvml.answers.set()
    assert (await look).elsewhere == {}


# --- locking ---------------------------------------------------------------------------------------


def test_all_devices_of_a_worker_are_locked_or_none(pool: GpuPool, tmp_path: Path) -> None:
    others = GpuLocks(tmp_path / "gpus")
    others.acquire([B], OTHERS)
    with pytest.raises(GpuLocked) as refused:
        pool.lock("test_W", [A, B])
    assert (refused.value.uuid, refused.value.who) == (B, str(OTHERS))
    assert others.holder_of(A) is None
    others.close()
    assert pool.lock("test_W", [A, B]) == (A, B)
    assert len(pool.inherited_fds([A, B])) == 3, "two locks, and their folder"


def test_what_is_locked_already_stays_ours(pool: GpuPool, tmp_path: Path) -> None:
    """A restart locks its own devices again; only the new ones are told, so that a refusal lets go of no others."""
    assert pool.lock("test_W", [A]) == (A,)
    assert pool.lock("test_W", [A]) == ()
    assert pool.lock("test_W", [A, B]) == (B,)
    pool.unlock([A, B, "GPU-never-ours"])
    pool.unlock([A])
    assert pool.inherited_fds([A, B]) == []
    assert GpuLocks(tmp_path / "gpus").holder_of(A) is None


@pytest.mark.timing
def test_locking_waits_for_nobody(pool: GpuPool, tmp_path: Path) -> None:
    """It runs on the event loop: somebody who has the lock is an answer at once, and no stream stands still."""
    others = GpuLocks(tmp_path / "gpus")
    others.acquire([A], OTHERS)
    before_s = time.monotonic()
    for _ in range(100):
        with pytest.raises(GpuLocked):
            pool.lock("test_W", [A])
    assert time.monotonic() - before_s < 100 * 0.05 / 2, "each of them waited its grace"
    others.close()
