"""Tests what the workers of one component ask each other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from pathlib import Path

import pytest

from dynamo_local.components.openai import port as module
from dynamo_local.components.openai import server
from dynamo_local.components.openai.port import Reply, Siblings
from dynamo_local.errors import StartTimedOut
from dynamo_local.system import fd_messages


async def test_each_hears_what_the_others_say(short_folder: Path):
    a, b, c = (Siblings(short_folder / "deep" / "of-Frontend", name) for name in "abc")
    with socket.socket() as theirs:
        inode = os.fstat(theirs.fileno()).st_ino

        async def says(what: str) -> Reply:
            return Reply({"asked": what}, (theirs.fileno(),) if what == "socket" else ())

        for each in (a, b):
            each.answer(says)
        assert await c.ask("x") == {name: Reply({"asked": "x"}) for name in "ab"}
        assert list(await a.ask("x")) == ["b"]
        (fd,) = (await b.ask("socket"))["a"].fds
        assert os.fstat(fd).st_ino == inode
        assert not os.get_inheritable(fd)
        os.close(fd)
    for each in (a, b, c):
        await each.close()
        await each.close()


async def test_who_is_gone_or_hung_is_left_out(short_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A killed process leaves its socket's file, a stopped one takes connections and says nothing. Whoever starts under
    the name of the killed one answers."""
    monkeypatch.setattr(module, "ASK_TIMEOUT_S", 0.1)
    a, again = Siblings(short_folder, "a"), Siblings(short_folder, "killed")
    with socket.socket(socket.AF_UNIX) as killed, socket.socket(socket.AF_UNIX) as hung:
        killed.bind(str(short_folder / "killed.sock"))
        hung.bind(str(short_folder / "hung.sock"))
        hung.listen()
        killed.close()
        assert await a.ask("x") == {}

        async def says(_: str) -> Reply:
            return Reply("here")

        again.answer(says)
        assert await a.ask("x") == {"killed": Reply("here")}
    await again.close()
    assert await a.ask("x") == {}
    await a.close()


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_taken_just_before_the_end_is_closed(short_folder: Path, turns: int):
    """So many turns of the loop before the end. A lost socket would fail this test with a ResourceWarning."""
    a = Siblings(short_folder, "a")

    async def says(_: str) -> Reply:
        return Reply("here")

    a.answer(says)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(short_folder / "a.sock"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await a.close()
        with contextlib.suppress(ConnectionError):
            assert asking.recv(1) == b""


async def test_without_descriptors_it_answers_later(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(server, "RETRY_S", 0.01)
    a = Siblings(short_folder, "a")

    async def says(_: str) -> Reply:
        return Reply("here")

    a.answer(says)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(short_folder / "a.sock"))
        fd_messages.send(asking, "x")
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            async with asyncio.timeout(5):
                while "no connection can be taken" not in caplog.text:
                    await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        asking.settimeout(5)
        assert (await asyncio.to_thread(fd_messages.receive, asking))[0] == "here"
    await a.close()


async def test_one_starts_at_a_time_and_none_waits_for_ever(short_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Two that bind at the same time would not have the same socket."""
    monkeypatch.setattr(module, "START_LOCK_S", 0.1)
    a, b = Siblings(short_folder, "a"), Siblings(short_folder, "b")
    async with a.starting_alone():
        with pytest.raises(StartTimedOut, match=r"another worker has held the start"):
            async with b.starting_alone():
                raise AssertionError("both")
    async with b.starting_alone(), asyncio.timeout(5):
        pass
    await a.close()
    await b.close()
