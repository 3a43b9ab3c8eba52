"""A measured profile in words, and as a page."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from dynamo_local.errors import ConfigError
from dynamo_local.profile.document import (
    FILE,
    Document,
    MemoryFacts,
    PointFacts,
    configuration_hash,
    described,
    differences,
    keep,
    read_document,
    resumed,
    write_document,
)
from dynamo_local.profile.fit import beyond
from dynamo_local.profile.points import Kind, Point, path_lengths
from dynamo_local.profile.reading import read_profile
from dynamo_local.profile.repetitions import Progress, Rules, Sample
from dynamo_local.profile.summary import facts_of, knees, summary_lines
from tests.fakes.profile_documents import document, engine
from tests.fakes.profile_folders import MAX_KV_TOKENS, decode_arrays, prefill_arrays, write_npz


def point(kind: str, tokens: float, requests: float, ms: float) -> PointFacts:
    return PointFacts(
        kind=kind,
        tokens=round(tokens),
        cached=0,
        requests=requests,
        kv_tokens=tokens * requests,
        mean_ms=ms,
        half_width_ms=0.01 * ms,
        repetitions=[ms * 0.99, ms, ms * 1.01],
        workers=["w", "w", "w"],
    )


def measured() -> Document:
    """Of the arrays of the folders that tests make."""
    prefill, decode = prefill_arrays(), decode_arrays()
    prompts = zip(prefill["prefill_isl"], prefill["prefill_ttft"], strict=True)
    loads = zip(decode["x_kv_usage"], decode["y_context_length"], decode["z_itl"], strict=True)
    points = [point("prefill", tokens, 1.0, ms) for tokens, ms in prompts]
    points += [point("decode", context, usage * MAX_KV_TOKENS / context, ms) for usage, context, ms in loads]
    memory = {"VllmWorker": {"ready": MemoryFacts(vram_bytes=70 * 2**30, host_bytes=None)}}
    return document(points=points, memory=memory, actions={"VllmWorker": {"cold": 31.5, "wake_1": 0.8}})


def test_the_knees_are_where_more_at_once_no_longer_pays():
    points = [point("prefill", tokens, 1, 10 + 0.02 * tokens) for tokens in (100, 1000, 10_000, 20_000)]
    points += [point("decode", 500, streams, ms) for streams, ms in ((1, 5.0), (2, 5.1), (4, 6.0), (8, 11.5))]
    points += [point("decode", 4000, streams, 5.0) for streams in (1, 2)]
    told = list(knees(document(points=points)))
    assert told[0].endswith("(48,780 tokens/s) from prompts of 10,000 tokens on")
    assert "decode at 500 tokens" in told[1]
    assert told[1].endswith("up to 4 streams")
    assert told[2].endswith("up to all 2 streams that fit")
    assert list(knees(document())) == []


def test_a_person_is_told_what_one_engine_does_what_it_holds_and_how_long_actions_take():
    told = "\n".join(summary_lines(measured()))
    for words in (
        "one engine sustains 83.33 prompts/s of 100 tokens, each within TTFT 12.0 ms",
        "streams of 500 tokens within ITL",
        "VllmWorker: cold 31.50 s, wake_1 0.80 s",
        "VllmWorker holds ready: 70.00 GiB of the GPU's memory",
        "confidence intervals of ±1.0% in the median, 0 wider than ±3 %",
        "noticed: something",
        "uncertified",
    ):
        assert words in told


class Page(HTMLParser):
    """Rows of its tables, what is loaded from elsewhere, and how many plots it has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.plots, self.text = 0, 0, ""
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rows += tag == "tr"
        self.plots += tag == "svg"
        named = {name: value or "" for name, value in attrs}
        self.elsewhere += [named[key] for key in ("src", "href") if named.get(key, "#")[0] not in "#d"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_of_a_measured_profile_stands_alone_and_has_every_point_with_its_spread(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from dynamo_local.profile.report import write_report

    profile, found = read_profile(write_npz(tmp_path / "p")), measured()
    write_report(tmp_path / "page.html", profile, facts_of(profile, (10.0,)), found)
    page = Page()
    page.feed((tmp_path / "page.html").read_text())
    assert (page.plots, page.elsewhere) == (1, [])
    assert page.rows > len(found.points)
    for words in ("1.0%", "cold 31.50 s", "full throughput", "uncertified", found.date):
        assert words in page.text, words


# --- document
# `profile.json`: read back as it was written, compared with what runs, refused where it is none.


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


# --- beyond
# Tests what a first token takes beyond the engine's time, as a fixed part and one per token.


@pytest.mark.parametrize(
    ("context", "apart", "lengths"),
    [
        (16_384, False, [128, 1024, 8192]),
        (16_384, True, [128, 512, 1024, 4096, 8192]),
        (1024, True, [128, 512]),
        (100, False, [50]),
    ],
)
def test_more_lengths_are_asked_over_http_where_a_hand_off_is_on_the_way(context, apart, lengths):
    assert path_lengths(context, apart=apart) == lengths


@pytest.mark.parametrize(
    ("points", "fixed_ms", "per_token_ms"),
    [
        ([(128, 3.128), (1024, 4.024), (8192, 11.192)], 3.0, 0.001),
        ([(128, 3.0), (1024, 2.0), (8192, 1.0)], None, 0.0),  # a hand-off never becomes shorter with its length
        ([(128, 4.0)], 4.0, 0.0),
        ([(128, 4.0), (128, 6.0)], 5.0, 0.0),
        ([(128, -1.0), (1024, -2.0)], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_what_comes_on_top_is_a_fixed_part_and_one_per_token(points, fixed_ms, per_token_ms):
    found = beyond(points)
    assert found[1] == pytest.approx(per_token_ms, abs=1e-9)
    if fixed_ms is None:
        assert 1.0 < found[0] < 3.0
    else:
        assert found[0] == pytest.approx(fixed_ms)


def test_it_is_kept_and_told_with_the_hand_off_where_there_is_one(tmp_path):
    way = {"overhead_ms": 3.0, "per_token_ms": 0.002}
    write_document(tmp_path, document(beyond_engine=way, engines={"prefill": engine(), "decode": engine()}))
    kept = read_document(tmp_path)
    assert kept is not None
    assert kept.beyond_engine == way
    [line] = [line for line in summary_lines(kept) if line.startswith("beyond the engine")]
    assert "3.00 ms, and 2.000 ms for each 1,000 tokens of its prompt, hand-off included" in line
    assert not any(line.startswith("beyond the engine") for line in summary_lines(document()))
