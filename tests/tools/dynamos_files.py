"""Dynamo's CRDs and example manifests, which are not ours to keep: `$DYN_KUBE`, else `../shared/data/kube` beside the
checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def dynamos_file(name: str) -> Path:
    """This file; the test is skipped, with the reason, where it is not to be had."""
    folder = _folder()
    if not (folder / name).is_file():
        pytest.skip(f"Dynamo's {name} is not in {folder} (DYN_KUBE names another folder)")
    return folder / name


def dynamos_manifests() -> list[Path]:
    """All of Dynamo's example manifests that are there; the test is skipped, with the reason, where there is none."""
    found = sorted(_folder().rglob("*.yaml"))
    if not found:
        pytest.skip(f"no manifests of Dynamo's are in {_folder()} (DYN_KUBE names another folder)")
    return found


def _folder() -> Path:
    return Path(os.environ.get("DYN_KUBE") or Path(__file__).parents[3] / "shared/data/kube")
