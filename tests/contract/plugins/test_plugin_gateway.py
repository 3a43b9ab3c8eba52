"""The gateway at which plugins register, asked by a client of its own."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from dynamo_local.errors import ConfigError
from tests.drivers.plugin_processes import PlannerSide, call, planner_side

GOOD: dict[str, Any] = {
    "plugin_id": "mine",
    "plugin_type": "propose",
    "endpoint": "unix:///tmp/never-called.sock",
    "protocol_version": "1.0",
    "auth_token": "token-of-team-a",
}
TWO_TEAMS = {
    "auth": {"trusted_sources": ["static_secret"], "static_secrets": {"env:A_TOKEN": "team-a", "env:B_TOKEN": "team-b"}}
}


@pytest.fixture
async def side() -> AsyncIterator[PlannerSide]:
    """A gateway on a socket, for two teams with a secret each; ticks every 5 s."""
    scheduling = {"gateway": {"enabled": True}, "scale_interval_seconds": 5}
    async with planner_side(scheduling, TWO_TEAMS, A_TOKEN="token-of-team-a", B_TOKEN="token-of-team-b") as made:
        yield made


async def refused(side: PlannerSide, method: str, raw: bytes | None = None, **fields: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(side.gateway, method, raw, **fields)
    return error.value.code()


async def test_a_good_plugin_is_taken_once(side: PlannerSide) -> None:
    answer = await call(side.gateway, "Register", **GOOD)
    assert (answer.accepted, answer.negotiated_protocol_version) == (True, "1.0")
    assert side.row("mine")["origin"] == "gateway"
    again = await call(side.gateway, "Register", **GOOD)
    assert (again.accepted, again.reject_reason.partition(":")[0]) == (False, "duplicate_plugin_id")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"auth_token": "wrong-token"}, "auth_failed"),
        ({"auth_token": ""}, "auth_failed"),
        ({"protocol_version": "x"}, "protocol_version_malformed"),
        ({"protocol_version": "2.0"}, "protocol_version_unsupported"),
        ({"observation_window_seconds": 7.0}, "observation_window_misaligned"),
        ({"endpoint": "inproc://mine"}, "endpoint_rejected"),
        ({"endpoint": "grpc://127.0.0.1:1"}, "transport_build_failed"),
    ],
)
async def test_refusals_have_dynamos_reasons(side: PlannerSide, change: dict[str, Any], reason: str) -> None:
    answer = await call(side.gateway, "Register", **{**GOOD, **change})
    assert (answer.accepted, answer.reject_reason.partition(":")[0]) == (False, reason)
    assert side.row("mine") == {}


async def test_what_is_no_registration_is_an_invalid_argument(side: PlannerSide) -> None:
    assert await refused(side, "Register", **{**GOOD, "plugin_type": "observe"}) is grpc.StatusCode.INVALID_ARGUMENT
    assert await refused(side, "Register", **{**GOOD, "plugin_id": "a b"}) is grpc.StatusCode.INVALID_ARGUMENT
    assert await refused(side, "Register", b"\xff\xff garbage") is grpc.StatusCode.INVALID_ARGUMENT
    assert await refused(side, "Register", b"\x00" * 100_000) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", ["Heartbeat", "Unregister"])
async def test_only_who_registered_a_plugin_speaks_for_it(side: PlannerSide, method: str) -> None:
    await call(side.gateway, "Register", **GOOD)
    theirs, wrong = "token-of-team-b", "wrong-token"
    assert await refused(side, method, plugin_id="mine", auth_token=theirs) is grpc.StatusCode.PERMISSION_DENIED
    assert await refused(side, method, plugin_id="gone", auth_token=theirs) is grpc.StatusCode.PERMISSION_DENIED
    assert await refused(side, method, plugin_id="mine", auth_token=wrong) is grpc.StatusCode.UNAUTHENTICATED
    assert side.row("mine") != {}
    assert (await call(side.gateway, method, plugin_id="mine", auth_token="token-of-team-a")).ok
    assert (side.row("mine") == {}) == (method == "Unregister")


async def test_the_list_is_not_for_plugins(side: PlannerSide) -> None:
    assert await refused(side, "ListPlugins") is grpc.StatusCode.PERMISSION_DENIED


async def test_there_are_so_many_plugins_and_no_more(side: PlannerSide) -> None:
    answers = [await call(side.gateway, "Register", **{**GOOD, "plugin_id": f"p{n}"}) for n in range(65)]
    assert [answer.accepted for answer in answers] == [True] * 64 + [False]
    assert answers[-1].reject_reason.startswith("too_many_plugins")


async def test_a_port_that_is_taken_is_a_configuration_error(side: PlannerSide) -> None:
    taken = {"gateway": {"enabled": True, "listen": side.gateway + "/no-folder/p.sock"}}
    with pytest.raises(ConfigError, match="cannot listen"):
        async with planner_side(taken):
            pass
    on_a_port = {"gateway": {"enabled": True, "listen": "127.0.0.1:0", "allow_insecure": True}}
    async with planner_side(on_a_port) as first:
        again = {"gateway": {**on_a_port["gateway"], "listen": first.gateway}}
        with pytest.raises(ConfigError, match="cannot listen"):
            async with planner_side(again):
                pass


async def test_a_secret_that_cannot_be_read_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="B_TOKEN"):
        async with planner_side({}, TWO_TEAMS, A_TOKEN="token-of-team-a"):
            pass


async def test_a_socket_that_a_killed_planner_left_behind_is_no_obstacle() -> None:
    async with planner_side() as empty:
        left = empty.folder / "plugins.sock"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(left))
        assert left.is_socket()
        side = PlannerSide(empty.folder, {"gateway": {"enabled": True}}, {})
        await side.service.start()
        assert (await call(side.gateway, "Register", **GOOD)).accepted
        await side.service.stop()
