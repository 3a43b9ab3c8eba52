"""A measured profile in words, and as a page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from dynamo_local.profile.document import Document, MemoryFacts, PointFacts
from dynamo_local.profile.reading import read_profile
from dynamo_local.profile.summary import facts_of, knees, summary_lines
from tests.fakes.profile_documents import document
from tests.fakes.profile_folders import MAX_KV_TOKENS, decode_arrays, prefill_arrays, write_npz


def point(kind: str, tokens: float, requests: float, ms: float) -> PointFacts:
    """Three repetitions, a per cent apart."""
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
        """See `HTMLParser`."""
        self.rows += tag == "tr"
        self.plots += tag == "svg"
        named = {name: value or "" for name, value in attrs}
        self.elsewhere += [named[key] for key in ("src", "href") if named.get(key, "#")[0] not in "#d"]

    def handle_data(self, data: str) -> None:
        """See `HTMLParser`."""
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
