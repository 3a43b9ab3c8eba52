"""A process that gets another environment: what Python, the C library and /proc then say. In a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import ctypes, json, os, sys
from dynamo_local.system import processes as own_environment
env, marks, secret, argv = json.loads(sys.stdin.read())
error = None
try:
    own_environment.become(env, marks=marks, secret=secret, argv=argv)
except OSError as caught:
    error = str(caught)
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
read = lambda name: open(f"/proc/self/{name}").read().split(chr(0))
child = os.popen("env").read().splitlines()
print(json.dumps({
    "error": error, "os": dict(os.environ),
    "c": {n: (libc.getenv(n.encode()) or b"").decode() for n in ("A", "B", "OLD")},
    "environ": [e for e in read("environ") if e], "cmdline": [w for w in read("cmdline") if w], "child": child,
}))
"""


def became(env: dict[str, str], *, start: dict[str, str], marks: list[str], secret: list[str], argv: list[str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "." * 200],
        input=json.dumps([env, marks, secret, argv]),
        env=start,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict = json.loads(done.stdout)
    return found


START = {"A": "1", "OLD": "x", "ROOM": "." * 400, "PATH": "/usr/bin:/bin"}


def test_nothing_of_the_former_environment_is_left_anywhere() -> None:
    env = {"A": "1", "B": "2", "PATH": "/usr/bin:/bin", "MARK": "me"}
    found = became(env, start=START, marks=["MARK"], secret=[], argv=["worker", "--name", "x"])
    assert found["error"] is None
    assert found["os"] == env
    assert found["c"] == {"A": "1", "B": "2", "OLD": ""}
    assert found["environ"] == ["MARK=me", "A=1", "B=2", "PATH=/usr/bin:/bin"]
    assert found["cmdline"] == ["worker", "--name", "x"]
    assert {"B=2", "MARK=me"} <= set(found["child"])
    assert not any(line.startswith("OLD=") for line in found["child"])


def test_proc_shows_no_secret_and_leaves_out_what_does_not_fit() -> None:
    env = {"MARK": "me", "B": "y" * 5000, "HF_TOKEN": "hush", "PATH": "/usr/bin:/bin"}
    found = became(env, start=START, marks=["MARK"], secret=["HF_TOKEN"], argv=["worker"])
    assert found["environ"] == ["MARK=me", "PATH=/usr/bin:/bin"]
    assert found["os"] == env


def test_marks_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    found = became({"MARK": "m" * 5000}, start=START, marks=["MARK"], secret=[], argv=["worker"])
    assert "need" in found["error"]
    assert found["os"]["OLD"] == "x"
    assert "OLD=x" in found["environ"]
