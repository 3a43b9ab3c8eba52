"""Real vLLM for a lent machine that has torch's libraries of CUDA, and no network.

    python -m tests.gpu.vllm_parts FOLDER

Writes `p0`, `p1`, …, pieces of one archive (`tar.xz`) of at most 48 MiB. There: `cat p* | tar -xJ -C /root/x`, then
`PYTHONPATH=/root/x`. Machine code of other cards than `ARCH` is zeroed, which makes a fifth of vLLM and torch. Packages
that the machine has (`THERE`), or that vLLM does without here, are left out.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tests.gpu.pack import FOR_TESTS, ROOT, SERVERS

ARCH = 90
"""sm_90: H100 and H200."""
PIECE_BYTES = 48 * 1024**2
PYTHON = "3.12"
FOR_UV, FOR_PIP = "x86_64-manylinux_2_34", "manylinux_2_28_x86_64"
"""The same machines, as each of the two names them."""
WHEELS = ("vllm==0.32.0", "torch==2.13.0")
OTHERS = ("nixl-cu13", *FOR_TESTS, *SERVERS)
THERE = (
    "torch torchaudio torchvision triton numpy pandas scipy pillow pyarrow numba llvmlite opencv-python-headless "
    "transformers tokenizers safetensors sentencepiece tiktoken huggingface-hub hf-xet sympy networkx setuptools ninja "
    "cmake grpcio cuda-bindings cuda-python nvidia-cuda-runtime"
)
NOT_NEEDED = (
    "torchcodec PyNvVideoCodec flashinfer-python flashinfer-cubin apache-tvm-ffi tilelang nvidia-cudnn-frontend nvtx "
    "fastsafetensors instanttensor nvidia-cutlass-dsl quack-kernels tokenspeed-mla humming-kernels"
)
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/_flashmla_C*",
    "vllm/_flashkda_C*",
    "vllm/_qutlass_C*",
    "vllm/_deepselect_C*",
    "torch/include/*",
    "torch/bin/protoc*",
)
MAGIC = struct.pack("<I", 0xBA55ED50)
"""A fat binary begins with it. Its entries follow a head of 16 bytes; cuobjdump shows the same."""
CUBIN, PTX = 2, 1


def entries(data: mmap.mmap | bytearray, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, offset and size of the code of each entry."""
    while begin + 64 <= end:
        kind, _, head, size = struct.unpack_from("<HHIQ", data, begin)
        if head < 32 or begin + head + size > end:
            return
        yield kind, struct.unpack_from("<I", data, begin + 28)[0], begin + head, size
        begin += head + size


def trim(data: mmap.mmap | bytearray, arch: int = ARCH) -> int:
    """Zero the code for other cards, in place; returns how many bytes.

    Where none is for `arch`, the newest PTX that it can read stays.
    """
    zeroed, at = 0, data.find(MAGIC)
    while at >= 0:
        _, head, size = struct.unpack_from("<HHQ", data, at + 4)
        begin, end = at + head, at + head + size
        if head != 16 or end > len(data):
            at = data.find(MAGIC, at + 4)
            continue
        found = list(entries(data, begin, end))
        kept = [each for each in found if each[0] == CUBIN and each[1] == arch]
        if not kept:
            kept = sorted(each for each in found if each[0] == PTX and each[1] <= arch)[-1:]
        for each in found:
            if each not in kept:
                data[each[2] : each[2] + each[3]] = bytes(each[3])
                zeroed += each[3]
        at = data.find(MAGIC, end)
    return zeroed


def unpack(wheel: Path, to: Path) -> None:
    """The wheel's files without `LEFT_OUT`, trimmed."""
    with zipfile.ZipFile(wheel) as content:
        names = [name for name in content.namelist() if not any(fnmatch(name, each) for each in LEFT_OUT)]
        content.extractall(to, names)
    for name in names:
        if name.endswith(".so") and (to / name).stat().st_size:
            with (to / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                trim(data)


def main() -> int:
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.stderr.write("name one folder that is not there yet\n")
        return 2
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as place:
        site, wheels, without = Path(place, "site"), Path(place, "wheels"), Path(place, "without")
        without.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in f"{THERE} {NOT_NEEDED}".split()))
        target = ("--python-version", PYTHON, "--python-platform", FOR_UV, "--only-binary", ":all:")
        wanted = (*WHEELS[:1], *OTHERS, str(ROOT), "--no-binary", "dynamo-local", "--override", str(without))
        run(sys.executable, "-m", "uv", "pip", "install", "-q", *target, "--target", str(site), *wanted)
        pip = (
            "--no-deps",
            "--python-version",
            PYTHON,
            "--platform",
            FOR_PIP,
            "--only-binary=:all:",
            "-d",
            str(wheels),
        )
        run(sys.executable, "-m", "pip", "download", "-q", *pip, *WHEELS)
        for wheel in wheels.iterdir():
            unpack(wheel, site)
        for pattern in LEFT_OUT:
            for file in site.glob(pattern):
                file.unlink(missing_ok=True) if file.is_file() else run("rm", "-r", str(file))
        for name in ("dynamo_local", "state", "circus_plugins"):  # these are in the checkout
            run("rm", "-rf", str(site / name))
        folder.mkdir(parents=True)
        pieces = f"tar -cf - -C '{site}' . | xz -T0 -4 | split -b {PIECE_BYTES} -d -a 1 - '{folder}/p'"
        run("bash", "-o", "pipefail", "-c", pieces)
    sys.stdout.write(f"{folder}: {len(list(folder.iterdir()))} pieces\n")
    return 0


def run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=3600)


if __name__ == "__main__":
    sys.exit(main())
