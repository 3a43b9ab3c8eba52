"""A few file descriptors are kept for when there are no others, and taken back when there are."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from dynamo_local.system.descriptors import SPARE, ReservedDescriptors
from tests.fakes.arbiter.told import Told


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def spare(told: Told) -> Iterator[ReservedDescriptors]:
    spare = ReservedDescriptors(told)
    yield spare
    spare.close()


def _free() -> int:
    """The number that the next descriptor gets."""
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


def test_they_are_let_go_when_there_are_no_others_and_taken_back(spare: ReservedDescriptors, told: Told) -> None:
    """A limit at what the process has now; then as it was. Each is told once, however often it looks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert spare.held == SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (_free(), hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        spare.look()
        spare.look()
        os.close(os.dup(0))
        without, notes = spare.held, told.notes
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    spare.look()
    spare.look()

    assert (without, spare.held) == (0, SPARE)
    assert ["no file descriptors left" in told[0], told[1:]] == [True, ["there are file descriptors again"]]
    assert (notes, told.notes) == (told[:1], []), "the note is gone with its cause"


def test_while_there_are_enough_nothing_is_told(spare: ReservedDescriptors, told: Told) -> None:
    before = _free()
    spare.look()
    assert (spare.held, _free(), told) == (SPARE, before, [])
