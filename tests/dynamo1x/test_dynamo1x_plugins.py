"""Dynamo's own reference example of a planner's plugin, unmodified from its wheel, against our planner."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from dynamo_local.planner.plugins.pipeline import Action
from dynamo_local.planner.plugins.registration import FAILURES_MAX, CircuitState
from tests.drivers.plugin_processes import PlannerSide, planner_side, process, ready
from tests.tools.compile_proto import COMPILED

pytestmark = pytest.mark.timeout(300)

DYNAMO = str(Path(__file__).with_name("dynamo_plugin.py"))
INSECURE = {"transport": {"allow_insecure_grpc": True}}
TOKEN = "token-of-the-test"
ANY_PORT = ("--listen", "127.0.0.1:0")

FieldType = descriptor_pb2.FieldDescriptorProto


def test_our_wire_format_is_dynamos() -> None:
    raw = subprocess.run([sys.executable, DYNAMO, "descriptors"], check=True, capture_output=True, timeout=60).stdout
    theirs = descriptor_pb2.FileDescriptorProto.FromString(raw)
    ours = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file[0]
    assert ours.package == theirs.package
    assert _enums(ours) == _enums(theirs)
    assert _services(ours) == _services(theirs)
    assert _messages(ours) == _messages(theirs)


def _enums(file: Any) -> dict[str, Any]:
    return {enum.name: {(value.name, value.number) for value in enum.value} for enum in file.enum_type}


def _services(file: Any) -> dict[str, Any]:
    return {
        service.name: {(method.name, method.input_type, method.output_type) for method in service.method}
        for service in file.service
    }


def _messages(file: Any) -> dict[str, Any]:
    return {message.name: {_field(message, field) for field in message.field} for message in file.message_type}


def _field(message: Any, field: Any) -> tuple[Any, ...]:
    """`optional` says nothing of a field that is a message: it has presence anyway."""
    optional = field.proto3_optional and field.type != FieldType.TYPE_MESSAGE
    real_oneof = field.HasField("oneof_index") and not field.proto3_optional
    oneof = message.oneof_decl[field.oneof_index].name if real_oneof else None
    return field.number, field.name, field.type, field.type_name, field.label, optional, oneof


def example(stage: str, *words: str, prefill: int = 7, decode: int = 11) -> tuple[str, ...]:
    return (DYNAMO, "run", *ANY_PORT, "--stage", stage, "--prefill", str(prefill), "--decode", str(decode), *words)


@asynccontextmanager
async def planned(*stages: tuple[str, ...]) -> AsyncIterator[PlannerSide]:
    """The example once for each of these command lines, named by the planner's configuration with priority 1."""
    async with AsyncExitStack() as stack:
        made: list[tuple[str, Process]] = []
        for words in stages:
            made.append((words[5], await stack.enter_async_context(process(*words))))
        plugins = [
            {"plugin_id": f"their-{stage}", "plugin_type": stage, "priority": 1, "endpoint": await ready(plugin)}
            for stage, plugin in made
        ]
        side = await stack.enter_async_context(planner_side({"external_plugins": plugins}, INSECURE))
        yield side
        for _, plugin in made:
            plugin.terminate()
        assert [await asyncio.wait_for(plugin.wait(), 30.0) for _, plugin in made] == [0] * len(made)


@pytest.mark.parametrize(
    ("stages", "targets"),
    [
        ([example("propose")], {"prefill": 7, "decode": 11}),
        ([example("propose"), example("reconcile", prefill=5, decode=6)], {"prefill": 5, "decode": 6}),
        ([example("propose"), example("constrain", prefill=4, decode=9)], {"prefill": 4, "decode": 9}),
        ([example("constrain", prefill=4, decode=9)], {}),
    ],
    ids=["propose", "propose-reconcile", "propose-constrain", "constrain"],
)
async def test_stages_of_the_example(stages: list[tuple[str, ...]], targets: dict[str, int]) -> None:
    async with planned(*stages) as side:
        assert await side.tick() == targets


async def test_all_four_stages() -> None:
    predict = example("predict", "--predict-num-req", "4242", "--predict-isl", "1024", "--predict-osl", "256")
    stages = (
        predict,
        example("propose"),
        example("reconcile", prefill=5, decode=6),
        example("constrain", prefill=4, decode=9),
    )
    async with planned(*stages) as side:
        assert await side.tick() == {"prefill": 4, "decode": 6}
        last = side.service.pipeline.last
        assert last is not None
        assert last.action is Action.APPLY
        assert last.prediction is not None
        assert (last.prediction.num_req, last.prediction.isl, last.prediction.osl) == (4242.0, 1024.0, 256.0)


GATEWAY = {"gateway": {"enabled": True, "listen": "127.0.0.1:0", "allow_insecure": True}}
AUTH = {"auth": {"trusted_sources": ["static_secret"], "static_secrets": {"env:PLUGIN_TOKEN": "team"}}}


async def test_the_example_registers_itself_and_dies() -> None:
    async with planner_side(GATEWAY, {**INSECURE, **AUTH}, PLUGIN_TOKEN=TOKEN) as side:
        words = ("--gateway-endpoint", side.gateway, "--auth-token", TOKEN, "--plugin-id", "theirs")
        async with process(*example("propose", *words)) as plugin:
            await ready(plugin)
            assert side.row("theirs")["priority"] == 5
            assert await side.tick() == {"prefill": 7, "decode": 11}
            plugin.kill()
            await plugin.wait()
            assert [await side.tick() for _ in range(FAILURES_MAX)] == [{}] * FAILURES_MAX
            assert side.circuit("theirs") is CircuitState.OPEN


async def test_a_wrong_token_ends_the_example() -> None:
    async with planner_side(GATEWAY, {**INSECURE, **AUTH}, PLUGIN_TOKEN=TOKEN) as side:
        words = ("--gateway-endpoint", side.gateway, "--auth-token", "wrong-token")
        async with process(*example("propose", *words)) as plugin:
            assert await asyncio.wait_for(plugin.wait(), 60.0) == 1
        assert side.service.rows() == ()
