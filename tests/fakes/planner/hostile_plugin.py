"""A gRPC plugin of PROPOSE that answers what no plugin should: `hostile_plugin.py SOCKET MODE`."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import grpc

from dynamo_local.planner.plugins import codec as wire

RESPONSE = wire.message("ProposeStageResponse")


def _response(**target: Any) -> bytes:
    made = RESPONSE()
    made.override.targets.add(sub_component_type="decode", **target)
    encoded: bytes = made.SerializeToString()
    return encoded


def _many() -> bytes:
    made = RESPONSE()
    for _ in range(1000):
        made.override.targets.add(sub_component_type="decode", replicas=3)
    encoded: bytes = made.SerializeToString()
    return encoded


ANSWERS = {
    "garbage": b"\xff\xfe not a message",
    "oversized": b"\x12" + b"\x00" * 8_000_000,
    "negative": _response(replicas=-3),
    "huge": _response(replicas=2**31 - 1),
    "unknown-type": _response(replicas=3, type=77),
    "many": _many(),
    "no-replicas": _response(),
    "empty": b"",
}


async def main(socket: str, mode: str) -> None:
    """Serve until it is killed."""

    async def propose(raw: bytes, context: Any) -> bytes:
        if mode == "slow":
            await asyncio.sleep(3600)
        if mode == "abort":
            await context.abort(grpc.StatusCode.INTERNAL, "no\x1b[2J\n" + "x" * 5000)
        if mode == "exit":
            os._exit(1)
        return ANSWERS[mode]

    async def bootstrap(raw: bytes, context: Any) -> bytes:
        answer: bytes = wire.message("BootstrapResponse")(ok=False, message="not today").SerializeToString()
        return answer

    server = grpc.aio.server()
    services = {"ProposePlugin": {"Propose": propose}}
    if mode == "refuses-bootstrap":
        services["PluginLifecycle"] = {"Bootstrap": bootstrap}
    for service, methods in services.items():
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{wire.PACKAGE}.{service}", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
