"""Runs every check of `tests/gpu` on this machine and writes what it saw: `python3 run.py [REPORT_FOLDER]`.

Lies in the folder that `pack.py` makes; needs Python, no network, no root. Ten minutes at most.
Exit codes: 0 all passed; 1 some failed; 2 this machine cannot run them (another Python, a broken pack); 3 no card.
Only the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
PASSED, FAILED, CANNOT, NO_CARD = 0, 1, 2, 3
INSTALL_TIMEOUT_S, TESTS_TIMEOUT_S = 120, 450
REPORT = "gpu-report"
LEFT_OUT = ("test_gpu_vllm.py", "test_gpu_vllm_sleep.py", "test_gpu_pack.py")
"""These need vLLM and a model, or make this folder."""


def main() -> int:
    words = sys.argv[1:]
    fake = "--fake-cards" in words
    places = [word for word in words if word != "--fake-cards"]
    report = Path(places[0] if places else REPORT).resolve()
    report.mkdir(parents=True, exist_ok=True)
    why = None if fake else no_card()
    if why is not None:
        return tell(report, f"no card: {why}", NO_CARD)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        try:
            python = installed(Path(folder))
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
            return tell(report, f"the pack cannot be installed: {error}\n{said}", CANNOT)
        return tested(python, Path(folder), report, fake=fake)


def tell(report: Path, text: str, code: int) -> int:
    sys.stdout.write(f"{text}\n")
    (report / "report.md").write_text(f"# GPU checks\n\n{text}\n")
    return code


def no_card() -> str | None:
    """Why there is none, by the driver's own library; None if there is one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return f"there is no NVIDIA driver here ({error})"
    code = nvml.nvmlInit_v2()
    if code != 0:
        return f"the NVIDIA driver cannot be used (nvmlInit: {code})"
    count = ctypes.c_uint()
    code = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return None if code == 0 and count.value else f"the NVIDIA driver shows {count.value} devices (code {code})"


def installed(folder: Path) -> Path:
    """The Python of a fresh environment with all that is needed, offline; `folder` gets the pack's content.

    pip runs out of its own wheel: the machine needs neither pip nor ensurepip.
    """
    with tarfile.open(HERE / "pack.tar.xz") as tar:
        tar.extractall(folder, filter="tar")
    wanted = (folder / "PYTHON").read_text().strip()
    if ".".join(platform.python_version_tuple()[:2]) != wanted:
        raise OSError(f"it is for Python {wanted}, this is {platform.python_version()}")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    (pip,) = (folder / "wheels").glob("pip-*.whl")
    wheels = [str(path) for path in (folder / "wheels").glob("*.whl") if path != pip]
    words = ["install", "-q", "--no-index", "--no-deps", "--no-warn-script-location", *wheels]
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([python, f"{pip}/pip", *words], check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S, env=env)
    for server in (folder / "servers").iterdir():
        server.rename(python.with_name(server.name))
    return python


def tested(python: Path, folder: Path, report: Path, *, fake: bool) -> int:
    junit, log = report / "junit.xml", report / "pytest.log"
    junit.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DYN_"))}
    env |= {
        "PATH": f"{python.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "PYTHONPATH": str(folder / "checkout"),
    }
    words = ["-v", "-rs", "-p", "no:cacheprovider", "--tb=long", f"--cards={'fake' if fake else 'real'}"]
    words += [f"--junit-xml={junit}", *(f"--ignore=tests/gpu/{name}" for name in LEFT_OUT), "tests/gpu"]
    began_s = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, "-m", "pytest", *words], cwd=folder / "checkout", env=env, stdout=output, stderr=output
        )
        try:
            code: int | None = process.wait(TESTS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            code = None
    text, failed = written(junit, code, time.monotonic() - began_s, fake=fake)
    sys.stdout.write(text)
    (report / "report.md").write_text(text)
    return FAILED if failed else PASSED


def written(junit: Path, code: int | None, took_s: float, *, fake: bool) -> tuple[str, bool]:
    lines = ["# GPU checks", "", f"- Python {platform.python_version()}, {platform.platform()}"]
    lines += ["- **fake cards**: this says nothing about a real one"] if fake else [f"- {line}" for line in cards()]
    lines += [f"- {took_s:.0f} s", ""]
    failed = code != 0
    if not junit.exists():
        lines.append("The tests " + ("took too long" if code is None else f"ended with {code}") + ": see pytest.log.")
        return "\n".join(lines) + "\n", True
    lines += ["| Check | Outcome | s | What it saw |", "|---|---|---|---|"]
    ran = 0
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        ran += case.find("skipped") is None
        lines.append(f"| {case.get('name')} | {outcome(case)} | {float(case.get('time') or 0):.1f} | {saw(case)} |")
    failed = failed or not ran
    return "\n".join([*lines, "", "FAILED: see pytest.log" if failed else f"{ran} passed"]) + "\n", failed


def outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return cell(f"{kind}: {found.get('message') or ''}")
    return "passed"


def saw(case: ElementTree.Element) -> str:
    found = {one.get("name"): json.loads(one.get("value") or "null") for one in case.iter("property")}
    return cell("; ".join(f"{name}: {value}" for name, value in found.items()))


def cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 300 else f"{text[:299]}…"


def cards() -> list[str]:
    words = [
        "nvidia-smi",
        "--query-gpu=index,name,uuid,driver_version,memory.total,memory.used",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi: {error}"]
    return (done.stdout or done.stderr).strip().splitlines()


if __name__ == "__main__":
    sys.exit(main())
