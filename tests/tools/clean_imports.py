"""For tests that load graphs: `sys.path` and `sys.modules` afterwards as they were before."""

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
        sys.path[:] = path
        for name in set(sys.modules) - set(modules):
            # Ours and installed packages stay: a second copy of a class would break isinstance elsewhere.
            file = getattr(sys.modules[name], "__file__", None) or ""
            if not name.startswith("dynamo_local") and "/lib/python" not in file:
                del sys.modules[name]
