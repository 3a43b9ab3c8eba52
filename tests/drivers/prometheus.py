"""A real Prometheus server (Debian's package `prometheus`), with a folder of its own, scraping pages each second."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.tools.free_port import free_port

BINARY = "DYN_PROMETHEUS"
"""Path of the server's program, where it is not on PATH."""
START_S = 30.0
STOP_S = 15.0


def find_prometheus() -> str:
    """The program; the test is skipped, or fails where it is required, without it."""
    found = os.environ.get(BINARY) or shutil.which("prometheus")
    if found is None:
        why = f"no prometheus here: apt-get install prometheus, or name the program by {BINARY}"
        if os.environ.get("DYN_PROMETHEUS_REQUIRED"):
            pytest.fail(why)
        pytest.skip(why)
    return found


class RealPrometheus:
    """The server; `url` is where it answers once `start` has returned. `web_config` is its own file of that name."""

    def __init__(self, folder: Path, *targets: str, web_config: str | None = None) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "dynamo", "static_configs": [{"targets": list(targets)}]}],
        }
        self._words = [
            find_prometheus(),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        if web_config is not None:
            (folder / "web.yml").write_text(web_config)
            self._words.append(f"--web.config.file={folder / 'web.yml'}")
        self.url = f"http{'s' if web_config else ''}://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")

    def start(self) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(self._words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline_s = time.monotonic() + START_S
        while not self._ready():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.05)

    def _ready(self) -> bool:
        if self.url.startswith("https"):
            return "Server is ready to receive web requests" in self.log
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/-/ready")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
