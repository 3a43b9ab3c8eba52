"""`lay_over.py VERSION` lays another vLLM's Python files over the CPU build here, where it has no CPU build of its own.

The files come from the official wheel. The compiled code stays that of the build, so a version that changed its
operators fails at the first pass. Ours have passed on 0.33.0 over 0.32.0.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

MORE = ("orjson", "mcp>=2.2")
"""Packages that 0.33 imports, and 0.32 did not install."""


def lay_over(version: str, site: Path) -> None:
    """Replace all Python files of `vllm` in `site`, and the name of its version."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, f"vllm=={version}")
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=1800)
        (wheel,) = Path(folder).glob("*.whl")
        for old in (site / "vllm").rglob("*.py"):
            old.unlink()  # uv links files of its cache: they are not written over
        with zipfile.ZipFile(wheel) as files:
            files.extractall(site, [name for name in files.namelist() if name.endswith(".py")])
    for info in site.glob("vllm-*.dist-info"):
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (info / "METADATA").unlink()
        (info / "METADATA").write_text(metadata)
        info.rename(site / f"vllm-{version}+cpu.dist-info")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *MORE], check=True, timeout=600)


if __name__ == "__main__":
    lay_over(sys.argv[1], Path(sysconfig.get_paths()["purelib"]))
