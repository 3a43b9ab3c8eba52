"""The real `pynvml`, on the cards of `tests/gpu/fake_cards.py`. First on PYTHONPATH it is found in its place."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_REAL = next(
    found for folder in sys.path if (found := Path(folder, "pynvml.py")).is_file() and found.resolve().parent != _HERE
)
_spec = importlib.util.spec_from_file_location("pynvml", _REAL)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["pynvml"] = _module  # whoever imports us gets this one
_spec.loader.exec_module(_module)

from tests.gpu.fake_cards import library  # noqa: E402 - it imports pynvml, which is only now the real one

_module.nvmlLib = library()
