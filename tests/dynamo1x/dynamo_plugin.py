"""Dynamo's own plugin code from its wheel, as it is: `dynamo_plugin.py run WORDS…` is its reference example,
`dynamo_plugin.py descriptors` prints its wire format.

The example imports the whole planner, which needs a package that is no more than a stub in the registry. So the
packages above its modules are made here as empty ones with their folders; the modules themselves are the wheel's.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

PACKAGES = (
    "dynamo",
    "dynamo.planner",
    "dynamo.planner.plugins",
    "dynamo.planner.plugins.proto",
    "dynamo.planner.examples",
    "dynamo.planner.examples.external_plugin",
)
EXAMPLE = "dynamo.planner.examples.external_plugin.reference_runner"


def empty_packages(packages: tuple[str, ...] = PACKAGES) -> None:
    """So that nothing is imported but what the modules import themselves."""
    found = find_spec("dynamo")
    assert found is not None
    assert found.submodule_search_locations is not None
    roots = [Path(folder) for folder in found.submodule_search_locations]
    for name in packages:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:])) for root in roots]
        sys.modules[name] = package


def main(what: str, *words: str) -> None:
    empty_packages()
    if what == "descriptors":
        from dynamo.planner.plugins.proto.v1 import plugin_pb2

        sys.stdout.buffer.write(plugin_pb2.DESCRIPTOR.serialized_pb)
        return
    sys.argv = [EXAMPLE, *words]
    runpy.run_module(EXAMPLE, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
