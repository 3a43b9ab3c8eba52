"""Certificates for tests, made by the `openssl` program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path, name: str = "tls", passphrase: str | None = None) -> tuple[Path, Path]:
    """PEM files of a certificate for 127.0.0.1 and localhost, and of its key. Skips where there is no `openssl`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl, to make a certificate")
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    words += ["-nodes"] if passphrase is None else ["-passout", f"pass:{passphrase}"]
    subprocess.run([*words, "-out", cert, "-keyout", key], check=True, capture_output=True, timeout=60)
    return cert, key
