"""Incremental text equals one-shot text, whole characters only, and stop strings never leak."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from dynamo_local.components.text.detokenizer import StopMatcher, TokenTable, WindowDecoder
from dynamo_local.components.text.tokenizer import load_tokenizer
from tests.tools.peak_memory import peak_bytes

TINY = load_tokenizer(None)
TEXTS = ["plain words", "naïve café", "中文字符 and 日本語", "emoji 🧪🧬👩‍🔬 mixed", "tabs\tand\nlines", "ﬁn " * 20]


def batches(ids: list[int], rng: random.Random) -> list[list[int]]:
    """Cut the ids into batches of 1 to 5."""
    cut = []
    while ids:
        n = rng.randint(1, 5)
        cut.append(ids[:n])
        ids = ids[n:]
    return cut


def stream(ids: list[int], stop: tuple[str, ...] = (), seed: int = 0, **options: int) -> tuple[str, int, bool]:
    """Feed in random batches; (text, counted tokens, stopped)."""
    detokenizer = TINY.detokenizer(stop, **options)  # type: ignore[arg-type]
    text, count = "", 0
    for batch in batches(ids, random.Random(seed)):
        piece = detokenizer.feed(batch)
        text += piece.text
        count += piece.num_tokens
        if piece.stopped:
            return text, count, True
    last = detokenizer.finish()
    return text + last.text, count, last.stopped


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(text: str) -> None:
    assert stream(TINY.encode(text))[0] == text


@given(ids=st.lists(st.integers(0, TINY.vocab_size - 1), max_size=60), seed=st.integers(0, 9))
def test_any_ids_stream_to_their_one_shot_decode(ids: list[int], seed: int) -> None:
    assert stream(ids, seed=seed)[0] == TINY.decode(ids)


def test_no_replacement_character_amid_a_stream() -> None:
    detokenizer = TINY.detokenizer()
    pieces = [detokenizer.feed([token]).text for token in TINY.encode("🧪中")]
    assert [p for p in pieces if p] == ["🧪", "中"]


def test_incomplete_character_at_the_end_is_shown() -> None:
    ids = TINY.encode("🧪")[:-1]
    assert stream(ids)[0] == TINY.decode(ids) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("seed", range(8))
def test_stop_string_across_tokens_and_batches_is_cut(seed: int) -> None:
    text = "one two three END four"
    got, count, stopped = stream(TINY.encode(text), stop=("END",), seed=seed)
    assert (got, stopped) == ("one two three ", True)
    assert "END" in TINY.decode(TINY.encode(text)[:count])
    assert "END" not in TINY.decode(TINY.encode(text)[: count - 1])


def test_text_is_held_only_as_far_as_a_stop_might_match() -> None:
    matcher = StopMatcher(["<|end|>"])
    assert matcher.feed("hello <") == ("hello ", False)
    assert matcher.feed("|e") == ("", False)
    assert matcher.feed("xit") == ("<|exit", False)
    assert matcher.flush() == ""


def test_held_text_comes_out_when_the_stream_ends() -> None:
    assert stream(TINY.encode("almost EN"), stop=("END",))[0] == "almost EN"


def test_first_completed_stop_string_wins() -> None:
    assert StopMatcher(["abcd", "bc"]).feed("xabcd") == ("xa", True)
    assert StopMatcher(["bcd", "abcd"]).feed("xabcd") == ("x", True)


def test_stop_string_may_be_included() -> None:
    assert StopMatcher(["b"], include_stop=True).feed("abc") == ("ab", True)


def test_min_tokens_are_not_searched_for_stop_strings() -> None:
    ids = TINY.encode("END of the END now")
    got, _, stopped = stream(ids, stop=("END",), min_tokens=len(TINY.encode("END of")))
    assert (got, stopped) == ("END of the ", True)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 20),
)
def test_stop_result_does_not_depend_on_the_batches(text: str, stops: list[str], seed: int) -> None:
    one, other, rng = StopMatcher(stops), StopMatcher(stops), random.Random(seed)
    results = []
    for matcher, cuts in ((one, [*text]), (other, ["".join(map(chr, b)) for b in batches([*map(ord, text)], rng)])):
        out, stopped = "", False
        for piece in cuts:
            new, stopped = matcher.feed(piece)
            out += new
            if stopped:
                break
        results.append((out + ("" if stopped else matcher.flush()), stopped))
    assert results[0] == results[1]
    assert not any(s in results[0][0] for s in stops)


@pytest.mark.parametrize("text", ["a" * 100_000, "ab" * 50_000])
def test_a_long_stop_string_takes_memory_in_its_length(text: str) -> None:
    def match() -> None:
        matcher = StopMatcher([text])
        assert matcher.feed(text[:-1]) == ("", False)
        assert matcher.feed(text[-1]) == ("", True)

    assert peak_bytes(match) < 20 * len(text)


def byte_fallback() -> RustTokenizer:
    """A SentencePiece-like tokenizer: words with a leading mark, and one token per byte."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁hello": 256, "▁world": 257, "!": 258}
    rust = RustTokenizer(models.WordLevel(vocab, unk_token="<0x00>"))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return rust


def test_window_decoder_keeps_spaces_and_whole_characters() -> None:
    ids = [256, 257, *"🧪中".encode(), 258, 256]
    table = TokenTable(byte_fallback())
    assert table.pieces is None
    for seed in range(10):
        decoder = WindowDecoder(table.decode)
        pieces = [decoder.feed(batch) for batch in batches(ids, random.Random(seed))]
        assert "".join([*pieces, decoder.feed((), final=True)]) == "hello world🧪中! hello"
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_window_decoder_does_not_hold_invalid_bytes_for_ever() -> None:
    decoder = WindowDecoder(TokenTable(byte_fallback()).decode)
    pieces = [decoder.feed([0xFF]) for _ in range(8)]
    assert any(pieces)
    assert "hello" in decoder.feed([256])


def test_feeding_a_large_batch_equals_feeding_its_tokens() -> None:
    ids = [random.Random(3).randrange(TINY.vocab_size) for _ in range(500)]
    assert TINY.detokenizer().feed(ids).num_tokens == 500
    one = TINY.detokenizer()
    assert one.feed(ids).text + one.finish().text == stream(ids)[0]
