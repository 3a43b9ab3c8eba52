"""A server that changes its role when it is asked to, as SGLang's: what counts as done, and what passes by itself."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.components.commands.http_server import DEFAULT_BODY, HttpConfig, switch_role
from dynamo_local.errors import FlipFailed
from tests.tools.openai_server import Server

DEADLINE_S = 10.0


def url(server: Server) -> str:
    """Where SGLang has it."""
    return f"http://127.0.0.1:{server.port}/pd_role_switch"


async def test_an_idle_server_has_the_other_role_and_takes_its_own_for_a_success(server: Server) -> None:
    server.role = "decode"
    for _ in range(2):
        await switch_role(url(server), DEFAULT_BODY, "prefill")
        assert server.role == "prefill"
    assert [note["switch"]["message"] for note in server.seen] == ["ok", "already in target role"]


async def test_one_that_still_holds_something_is_asked_again(server: Server) -> None:
    server.role = "prefill"
    server.kept.add("a prompt")
    switching = asyncio.create_task(switch_role(url(server), DEFAULT_BODY, "decode"))
    async with asyncio.timeout(DEADLINE_S):
        while not server.seen:
            await asyncio.sleep(0.01)
        assert not switching.done()
        server.kept.clear()
        await switching
    assert server.role == "decode"


async def test_a_change_that_was_given_up_halfway_is_waited_for(server: Server) -> None:
    server.role, server.switch_s = "prefill", 0.3
    switching = asyncio.create_task(switch_role(url(server), DEFAULT_BODY, "decode"))
    async with asyncio.timeout(DEADLINE_S):
        while not server.switching:
            await asyncio.sleep(0.01)
        switching.cancel()
        await asyncio.wait({switching})
        await switch_role(url(server), DEFAULT_BODY, "prefill")
    assert server.role == "prefill"


@pytest.mark.parametrize(
    ("role", "stuck", "why"), [("decode", "rebuild failed; restart required", "restart required"), (None, None, "400")]
)
async def test_what_does_not_pass_is_told_in_the_servers_words(
    server: Server, role: str | None, stuck: str | None, why: str
) -> None:
    server.role, server.stuck = role, stuck
    with pytest.raises(FlipFailed, match=why):
        await switch_role(url(server), DEFAULT_BODY, "prefill")
    assert len(server.seen) == 1


async def test_a_server_that_is_gone_is_no_success(server: Server) -> None:
    with pytest.raises(FlipFailed, match="does not become prefill"):
        await switch_role("http://127.0.0.1:9/pd_role_switch", DEFAULT_BODY, "prefill")
    with pytest.raises(FlipFailed, match="404"):
        await switch_role(f"http://127.0.0.1:{server.port}/no_such_call", DEFAULT_BODY, "prefill")


def test_the_body_is_sglangs_unless_it_is_given() -> None:
    config = HttpConfig(command="s {port:http}", runtime="http", role_switch="/pd_role_switch")
    assert config.role_switch_body == {"new_role": "{role}"}
    with pytest.raises(ValueError, match="role_switch must be a path"):
        HttpConfig(command="s {port:http}", runtime="http", role_switch="pd_role_switch")
