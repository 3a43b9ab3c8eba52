"""Write the byte code of what our processes import, and of little else: `compile_used.py [vllm]`.

The graphs of a test run are hundreds of processes that may not write byte code (`tests.drivers.served`), so it has to
be there before. An installer that compiles whatever it installs does several times as much as is needed: of Kubernetes'
client, pandas, scipy, torch and transformers nobody imports more than a part. So each module of ours is imported here,
and Python writes what that brings along. The rest of small packages is compiled too, because it is imported where it
is needed. With `vllm`, also what a worker with that engine imports.
"""

from __future__ import annotations

import compileall
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SMALL_BYTES = 2_000_000
"""Packages that are compiled whole: nats-py, circus, pydantic and the like, each in half a second at most."""
NOT_ITS_TESTS = re.compile(r"/tests?/")
BESIDE = (
    "circus.circusctl",
    "circus.circusd",
    "circus.plugins",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
)
"""Modules that processes of graphs import and no module of ours names."""


def ours() -> Iterator[str]:
    """The names of our modules, without those that run at their import, and without those that need vLLM."""
    for path in walked():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if path.name != "__main__.py" and not name.startswith("dynamo_local.engines.vllm"):
            yield name


def walked() -> list[Path]:
    """Every Python file of ours; two of the folders are links."""
    return sorted(
        Path(folder, file)
        for folder, _, files in os.walk(ROOT / "dynamo_local", followlinks=True)
        for file in files
        if file.endswith(".py")
    )


def imported(name: str) -> bool:
    """Whether it could be: what an extra brings may be missing."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def packages() -> Iterator[Path]:
    """The folders of the installed packages of which something has been imported."""
    installed = Path(sysconfig.get_paths()["purelib"])
    for name in sorted({module.partition(".")[0] for module in sys.modules}):
        if (installed / name).is_dir():
            yield installed / name


def is_small(folder: Path) -> bool:
    files = (path for path in folder.rglob("*.py") if not NOT_ITS_TESTS.search(str(path)))
    return sum(path.stat().st_size for path in files) <= SMALL_BYTES


def main(words: list[str]) -> int:
    """0, also where something cannot be imported: who needs it will say so."""
    sys.dont_write_bytecode = False
    sys.path.insert(0, str(ROOT))
    missing = [name for name in (*ours(), *BESIDE) if not imported(name)]
    if "vllm" in words:
        try:
            from dynamo_local.worker.prewarmed import preload

            preload("vllm")
        except ImportError as error:
            missing.append(str(error))
    whole = [folder for folder in packages() if is_small(folder)]
    for folder in whole:
        compileall.compile_dir(folder, quiet=2, rx=NOT_ITS_TESTS)
    print(f"byte code of {len(sys.modules)} modules and {len(whole)} whole packages; not there: {missing}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
