"""Compile `plugin.proto` into the descriptors beside it: `python tests/tools/compile_proto.py`. Needs grpcio-tools."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

PROTO = Path(__file__).parents[2] / "dynamo_local" / "planner" / "plugins" / "plugin.proto"
COMPILED = PROTO.with_suffix(".binpb")


def compiled() -> bytes:
    """A `FileDescriptorSet` of `plugin.proto`, without comments. Raises `RuntimeError` for one that is wrong."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.binpb")
        words = ["protoc", f"--proto_path={PROTO.parent}", f"--descriptor_set_out={made}", PROTO.name]
        if protoc.main(words) != 0:
            raise RuntimeError(f"{PROTO} cannot be compiled; protoc said why")
        return made.read_bytes()


if __name__ == "__main__":
    COMPILED.write_bytes(compiled())
    sys.stdout.write(f"{COMPILED}\n")
