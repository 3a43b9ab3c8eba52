"""`profile.json`: read back as it was written, compared with what runs, refused where it is none."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dynamo_local.errors import ConfigError
from dynamo_local.profile.document import (
    FILE,
    configuration_hash,
    described,
    differences,
    keep,
    read_document,
    resumed,
    write_document,
)
from dynamo_local.profile.points import Kind, Point
from dynamo_local.profile.repetitions import Progress, Rules, Sample
from dynamo_local.profile.summary import summary_lines
from tests.fakes.profile_documents import document, engine


def test_it_is_read_back_as_it_was_written(tmp_path):
    """And a folder without one has none: Dynamo's own profiles are such."""
    assert read_document(tmp_path) is None
    write_document(tmp_path, document())
    assert read_document(tmp_path) == document()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{", "measure it again"), (b"{}", "missing required field"), (b"\xff\xfe", "measure it again")],
)
def test_what_is_none_is_refused_with_the_file(tmp_path, content, said):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        read_document(tmp_path)
    assert str(tmp_path / FILE) in str(refused.value)


def test_another_format_is_refused(tmp_path):
    write_document(tmp_path, document(format=2))
    with pytest.raises(ConfigError, match="format 2"):
        read_document(tmp_path)


def test_the_same_engines_fit():
    assert differences(document(), {"agg": described(engine())}, frozenset({"H200"}), {"sim": "1"}) == []


def test_everything_that_differs_is_named():
    """Options, GPUs per engine, devices, versions and roles that were not measured."""
    other = msgspec.structs.replace(engine(**{"sim.speed": 1.0, "sim.block_size": 16.0}), gpus=2)
    found = differences(document(), {"agg": described(other)}, frozenset({"H100"}), {"sim": "2"})
    assert found == [
        "agg: gpus is 2 here and was 1",
        "agg: sim.block_size is 16.0 here and was not set",
        "agg: sim.speed is 1.0 here and was 10.0",
        "GPUs are H100 here and were H200",
        "sim is 2 here and was 1",
    ]
    assert differences(document(), {"decode": described(engine())}) == [
        "there are decode engines here, and none was measured"
    ]


def test_the_hash_is_of_what_is_configured():
    one, two = described(engine()), described(engine(**{"sim.speed": 1.0}))
    assert configuration_hash({"a": one, "b": two}) == configuration_hash({"b": two, "a": one})
    assert configuration_hash({"a": one}) != configuration_hash({"a": two})


def test_the_summary_tells_rates_spread_actions_and_what_is_wrong():
    text = "\n".join(summary_lines(document()))
    for part in ("100.00 prompts/s of 100 tokens", "±1.0%", "cold 2.00 s", "noticed: something", "uncertified"):
        assert part in text


def test_what_was_kept_of_other_engines_is_not_gone_on_with(tmp_path):
    rules = Rules()
    with pytest.raises(ConfigError, match="nothing to go on with"):
        resumed(tmp_path, rules, "h")
    point = Point(Kind.DECODE, 100, 4)
    progress = Progress((point,), rules).noted(point, [Sample("w", 1.0, 2.0, 4.0, 400.0)], 3.0)
    keep(tmp_path, progress, "h")
    assert resumed(tmp_path, rules, "h") == progress
    assert resumed(tmp_path, replace(rules, budget_s=1.0), "h").next_point() is None
    with pytest.raises(ConfigError, match="another configuration"):
        resumed(tmp_path, rules, "other")
    (tmp_path / "measuring.json").write_text("[]")
    with pytest.raises(ConfigError, match="begin anew"):
        resumed(tmp_path, rules, "h")
