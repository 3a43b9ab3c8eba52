"""`executors.end_at_the_latest` in processes of their own: one that is done ends, whatever Python waits for."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

WAITS = {
    "a thread": """
        threading.Thread(target=lambda: time.sleep(3600), name="forgotten").start()
        end_at_the_latest(7, within_s=0.2)
    """,
    "a task": """
        async def deaf():
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)

        async def main():
            task = asyncio.create_task(deaf(), name="forgotten")
            await asyncio.sleep(0)
            end_at_the_latest(7, within_s=0.2)

        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("waits", WAITS.values(), ids=WAITS.keys())
def test_a_process_that_python_would_keep_ends_and_says_what_was_left(waits: str) -> None:
    done = run(waits)
    assert done.returncode == 7
    assert "forgotten" in done.stderr


def test_a_process_that_ends_by_itself_says_nothing() -> None:
    done = run("end_at_the_latest(7, within_s=3600)")
    assert (done.returncode, done.stderr) == (0, "")


def run(code: str) -> subprocess.CompletedProcess[str]:
    """That code, in a new interpreter."""
    imports = (
        "import asyncio, contextlib, threading, time\nfrom dynamo_local.system.executors import end_at_the_latest\n"
    )
    program = imports + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
