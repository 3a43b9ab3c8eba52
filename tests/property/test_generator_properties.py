"""Whatever can be asked of the generator gives a trace that `simulator.trace` reads back as it was."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dynamo_local.simulator.generator import KINDS, BadGenerate, Generated, generate, parse_generated
from dynamo_local.simulator.trace import read_trace, write_trace
from tests.tools.examples import examples

ENOUGH = 150
"""Of a long trace the first so many requests are looked at."""


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Ends included: they are where formulas break."""
    return st.sampled_from([low, high]) | st.floats(low, high)


KEYS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32 - 1),
    "duration": numbers(0.001, 31 * 86400),
    "rate": numbers(0.001, 10_000),
    "cv": numbers(0, 5),
    "period": numbers(1, 31 * 86400),
    "amplitude": numbers(0, 1),
    "start": numbers(0, 31 * 86400),
    "isl": st.integers(1, 20_000),
    "isl-sigma": numbers(0, 2),
    "isl-max": st.integers(20_000, 200_000),
    "osl": st.integers(1, 2_000),
    "osl-sigma": numbers(0, 2),
    "osl-max": st.integers(2_000, 1_000_000),
    "reuse": numbers(0, 0.9),
    "think": numbers(0, 86400),
    "system": st.integers(0, 100_000),
    "systems": st.integers(1, 100),
}


@st.composite
def words(draw: st.DrawFn) -> Generated:
    """A kind and some keys, as somebody would write them; those that cannot be together are passed over."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    keys = draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True))
    try:
        return parse_generated(",".join([kind, *(f"{key}={draw(KEYS[key])!r}" for key in keys)]))
    except BadGenerate:
        assume(False)
        raise


@settings(max_examples=examples(100))
@given(words())
def test_any_valid_word_makes_a_trace_that_is_read_back_as_it_was(word: Generated) -> None:
    rows = list(islice(generate(word.options), ENOUGH))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl.gz"
        assert write_trace(path, rows) == len(rows) >= 1
        assert read_trace(path) == rows
    options = word.options
    for row in rows:
        assert 0 <= row.at_s <= options.duration + 0.0005
        assert 1 <= row.input_length <= options.isl_max
        assert 1 <= row.output_length <= options.osl_max
    assert list(islice(generate(parse_generated(str(word)).options), ENOUGH)) == rows
