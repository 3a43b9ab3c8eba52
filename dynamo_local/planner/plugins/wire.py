"""The messages of `plugin.proto`, made from its compiled descriptors.

They are made when this module is imported, and not generated beforehand: generated code demands the protobuf that it
was generated for, and one of two copies in a process (Dynamo's own, in a plugin's) clashes with the other. Here the
descriptors have a pool of their own.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "dynamo.planner.plugin.v1"


def _pool() -> Any:
    compiled = files(__package__).joinpath("plugin.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()


def message(name: str) -> Any:
    """The class of a message: `message("RegisterRequest")`. KeyError for one that is not in `plugin.proto`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def methods(service: str) -> dict[str, tuple[str, Any, Any]]:
    """Of a service: its methods, each with its path, and the classes of its request and response."""
    found = _POOL.FindServiceByName(f"{PACKAGE}.{service}")
    return {
        method.name: (
            f"/{PACKAGE}.{service}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
        )
        for method in found.methods
    }
