"""How many examples a property is tried on: a third of them each time, all where DYN_EXAMPLES=full (`tox -m full`)."""

from __future__ import annotations

import os

ONE_IN = 3


def examples(full: int) -> int:
    """How many of so many this run draws; each run draws anew."""
    return full if os.environ.get("DYN_EXAMPLES") == "full" else full // ONE_IN
