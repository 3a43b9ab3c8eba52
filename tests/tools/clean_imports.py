"""For tests that load graphs: nothing of theirs is in `sys.path` and `sys.modules` afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def clean_imports() -> Iterator[None]:
    """Forget what was imported, and put on the path, inside."""
    path, modules = list(sys.path), dict(sys.modules)
    try:
        yield
    finally:
        # What is gone is not put back: the folder of an earlier load, which the loader would no longer know as such.
        sys.path[:] = [each for each in sys.path if each in path]
        for name in set(sys.modules) - set(modules):
            # Ours and installed packages stay: a second copy of a class would break isinstance elsewhere.
            file = getattr(sys.modules[name], "__file__", None) or ""
            if not name.startswith("dynamo_local") and "/lib/python" not in file:
                del sys.modules[name]
