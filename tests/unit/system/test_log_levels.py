"""The level of our log, whatever other packages do to the root logger."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
from dynamo_local.system.request_log import log_to_stderr
log_to_stderr("INFO")
logging.getLogger().setLevel(logging.ERROR)
logging.getLogger("dynamo_local.worker").info("ours")
logging.getLogger("another").info("theirs")
"""


def test_a_package_that_silences_the_root_logger_does_not_silence_ours() -> None:
    """One behind vLLM's API does. From then on nobody learned why an answer had gone on at another worker."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert "dynamo_local.worker: ours" in done.stderr
    assert "theirs" not in done.stderr
