"""Another user of this host, made for a test: only root can."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.servers import find_server
from tests.tools.required import NEEDS_ROOT

SCRIPT = Path(__file__).parents[1] / "tools" / "stranger.py"
TIMEOUT_S = 60.0
ETCD_TIMEOUT_S = 2
PYTHONS = (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")


class Stranger:
    """His commands run as him, with nothing of our environment. `tools` is a folder that he can read."""

    def __init__(self, uid: int, gid: int, tools: Path) -> None:
        self._who: dict[str, Any] = {"user": uid, "group": gid, "extra_groups": []}
        self._etcdctl = tools / "etcdctl"
        shutil.copy(find_server("etcd").path.with_name("etcdctl"), self._etcdctl)
        tools.chmod(0o755)
        self._etcdctl.chmod(0o755)
        self._python = next((each for each in PYTHONS if self._can_run(each)), None)

    def _can_run(self, python: str) -> bool:
        try:
            return self.run([python, "-c", "import ssl"]).returncode == 0
        except OSError:
            return False

    def run(self, words: Sequence[str | Path], text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            input=text,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            **self._who,
        )

    def gets(self, **what: Any) -> dict[str, list[Any]]:
        """The things that he gets hold of, by way (`tests/tools/stranger.py`). Skips where he has no Python."""
        if self._python is None:
            pytest.skip(f"another user can run none of {', '.join(PYTHONS)}")
        done = self.run([self._python, "-I", "-c", SCRIPT.read_text()], json.dumps(what))
        assert done.returncode == 0, done.stderr
        found: dict[str, list[Any]] = json.loads(done.stdout)
        return found

    def etcdctl(self, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
        """As he would use it: he trusts whoever answers, and has no certificate."""
        trusting = ("--insecure-skip-tls-verify", "--insecure-transport=false") if endpoint.startswith("https") else ()
        timeouts = (f"--command-timeout={ETCD_TIMEOUT_S}s", f"--dial-timeout={ETCD_TIMEOUT_S}s")
        return self.run([self._etcdctl, "--endpoints", endpoint, *trusting, *timeouts, *words])


@contextmanager
def another_user() -> Iterator[Stranger]:
    """A user of the host, gone at the end. Skips, with the reason, where we may not make one."""
    if os.getuid() != 0:
        pytest.skip(f"{NEEDS_ROOT}: it makes another user of this host")
    if shutil.which("useradd") is None:
        pytest.skip("needs useradd: it makes another user of this host")
    name = f"dyn-stranger-{os.getpid()}"
    subprocess.run(["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", name], check=True)
    try:
        with tempfile.TemporaryDirectory(prefix="dyn-tools-") as tools:
            entry = pwd.getpwnam(name)
            yield Stranger(entry.pw_uid, entry.pw_gid, Path(tools))
    finally:
        subprocess.run(["userdel", name], check=True, capture_output=True)
