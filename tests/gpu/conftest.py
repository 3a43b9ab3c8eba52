"""The cards of this host; where there is none, folders in their place (`fake_cards.py`), so that the checks are tested.

`--cards=real` takes no folders, `--cards=fake` nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo_local.core.gpus import GpuDevice, cuda_visible_devices, occupant
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import Inventory, open_inventory
from tests.drivers.served import ROOT
from tests.gpu import fake_cards
from tests.gpu.holder import FAKE, GIB

SEEN_WITHIN_S = 20.0
"""NVML shows an allocation at once and a death when the driver has torn the context down: a second or two."""


@dataclass(frozen=True)
class Held:
    """A child's view: its number of devices, and the UUID of the one it holds memory on."""

    devices: int
    uuid: str


@dataclass
class Cards:
    """The cards to test on. `env` is for whatever is started."""

    inventory: Inventory
    fake: bool
    env: dict[str, str] = field(default_factory=dict)

    def device(self, uuid: str) -> GpuDevice:
        (found,) = (device for device in self.inventory.sample() if device.uuid == uuid)
        return found

    def until(self, uuid: str, condition: Callable[[GpuDevice], bool]) -> GpuDevice:
        """Look until the device fulfils the condition. NVML has no event for this: it is asked again."""
        deadline_s = time.monotonic() + SEEN_WITHIN_S
        while not condition(device := self.device(uuid)):
            assert time.monotonic() < deadline_s, f"not seen within {SEEN_WITHIN_S} s: {device}"
            time.sleep(0.02)
        return device

    @contextmanager
    def holding(self, device: GpuDevice) -> Iterator[Held]:
        """A process pinned to the device by UUID that holds a GiB of it until the block ends."""
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.holder", str(GIB)],
            cwd=ROOT,
            env={**os.environ, **self.env, "CUDA_VISIBLE_DEVICES": cuda_visible_devices([device])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            line = child.stdout.readline().split()
            if len(line) != 2:
                child.kill()
                pytest.fail(f"the child could not hold memory: {child.communicate(timeout=10)[1]}")
            yield Held(int(line[0]), line[1])
        finally:
            child.kill()
            child.communicate(timeout=10)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cards", choices=("any", "real", "fake"), default="any", help="GPUs, or two folders")


@pytest.fixture(scope="session")
def a_card_is_here() -> bool:
    """Whether the driver shows one: asked before `cards` may have put folders in its place, for the whole session."""
    inventory = open_inventory(None, os.environ)
    try:
        return bool(inventory.sample())
    except GpuError:
        return False
    finally:
        inventory.close()


@pytest.fixture(scope="session")
def cards(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, a_card_is_here: bool
) -> Iterator[Cards]:
    """Skips where there is none of those that are wanted."""
    wanted = request.config.getoption("--cards", default="any")
    env = {"PYTHONPATH": str(ROOT)}
    fake = wanted == "fake" or (wanted == "any" and not a_card_is_here)
    with pytest.MonkeyPatch.context() as patch:
        if fake:
            folder = fake_cards.make(tmp_path_factory.mktemp("cards"))
            env |= {FAKE: str(folder), "PYTHONPATH": f"{fake_cards.SITE}:{ROOT}"}
            fake_cards.install(patch, folder)
        env |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        inventory = open_inventory(None, {} if fake else os.environ)
        try:
            inventory.sample()
        except GpuError as error:
            pytest.skip(f"needs an NVIDIA card: {error}")
        yield Cards(inventory, fake, env)
        inventory.close()


@pytest.fixture
def idle(cards: Cards) -> GpuDevice:
    """A device that nobody is on; skips where all are busy."""
    devices = cards.inventory.sample()
    for device in devices:
        if occupant(device) is None:
            return device
    pytest.skip(f"needs an idle GPU; they are held by {[occupant(device) for device in devices]}")


@pytest.fixture
def saw(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`saw(name=value)` is what the report of `run.py` shows beside the test."""

    def note(**facts: Any) -> None:
        for name, value in facts.items():
            record_property(name, json.dumps(value, default=str, ensure_ascii=False))

    return note


@pytest.fixture
def real_cards(cards: Cards) -> Cards:
    """Skips where they are fake."""
    if cards.fake:
        pytest.skip("CUDA itself is not faked")
    return cards
