"""The folder for a bare machine (`pack.py`, `run.py`): made here, below its size, run offline in a new venv."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.served import ROOT

GPU = ROOT / "tests" / "gpu"
NO_CARD = 3
BARE = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PIP_INDEX_URL": "http://127.0.0.1:9/"}
"""No network: whoever asked an index would fail."""


def run(script: Path, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs with a Python that has nothing installed."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    return subprocess.run(
        [python, "-I", script, *words], env=BARE, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_without_a_card_the_run_says_so_and_has_an_exit_code_for_it(tmp_path: Path, a_card_is_here: bool) -> None:
    if a_card_is_here:
        pytest.skip("there is a card here")
    script = Path(shutil.copy(GPU / "run.py", tmp_path))
    done = run(script, str(tmp_path / "report"))
    assert (done.returncode, done.stderr) == (NO_CARD, "")
    assert done.stdout.startswith("no card: ")
    assert "no card: " in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.full
@pytest.mark.infra
@pytest.mark.timeout(1200)
def test_the_pack_is_small_installs_offline_and_reports_what_it_saw(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    made = subprocess.run(
        [sys.executable, GPU / "pack.py", pack], capture_output=True, text=True, timeout=600, check=False
    )
    assert made.returncode == 0, made.stderr
    assert sum(path.stat().st_size for path in pack.iterdir()) < 64 * 1024**2
    done = run(pack / "run.py", str(tmp_path / "report"), "--fake-cards", timeout_s=580.0)
    report = (tmp_path / "report" / "report.md").read_text()
    assert done.returncode == 0, (done.stdout, done.stderr, (tmp_path / "report" / "pytest.log").read_text()[-3000:])
    assert "this says nothing about a real one" in report
    for check in ("inventory", "topology", "stranger", "quarantined", "pinned", "killed"):
        assert any(check in line and "| passed |" in line for line in report.splitlines()), (check, report)
