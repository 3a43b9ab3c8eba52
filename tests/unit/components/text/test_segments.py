"""Texts tokenised by segments that are remembered: the ids are those of the whole text, for each kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from dynamo_local.components.text.model import TINY_FOLDER
from dynamo_local.components.text.segments import SegmentCache

WORDS = (
    "the worker",
    " waits for 1,024 tokens",
    "\n\n",
    "  ",
    "É",
    "日本",
    "<|im",
    "_end|>",
    "a<s>b",
    "b",
    "'s",
    "<x>",
)
CORPUS = ["the worker waits for its arbiter and 1,024 tokens", "É 日本 'twas the worker's <|im _end|> a b"] * 20


def trained(pre: Any, normalizer: Any = None, special: Sequence[Any] = ("<s>", "<|im_end|>", "<x>")) -> Tokenizer:
    """A BPE tokenizer of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    tokenizer.add_special_tokens([each if isinstance(each, AddedToken) else AddedToken(each) for each in special])
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False))
    tokenizer.add_special_tokens(["<s>", "<|im_end|>"])
    return tokenizer


def with_more(*more: AddedToken) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
        tokenizer.add_tokens(list(more))
        return tokenizer

    return make


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "ours": lambda: Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json")),
    "byte level": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte level with a space": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace, first": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace, always": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "prepend": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="never"), normalizers.Prepend("▁")),
    "WordPiece": bert,
    "a special token that takes spaces": lambda: trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False), special=[AddedToken("<s>", rstrip=True), "<|im_end|>"]
    ),
    "a token that contains one": with_more(AddedToken("a<s>", normalized=False), AddedToken("<|im", normalized=False)),
    "tokens of the text": with_more(AddedToken("worker", normalized=True), AddedToken("<s>b", single_word=True)),
}
CUT = {"ours", "byte level", "WordPiece"}
"""Kinds that surely are cut."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, Tokenizer, SegmentCache]:
    rust = KINDS[request.param]()
    return request.param, rust, SegmentCache(rust, short=0)


@given(pieces=st.lists(st.sampled_from((*WORDS, "<s>", "<|im_end|>", "<|im_start|>", "<|endoftext|>")), max_size=12))
def test_ids_are_those_of_the_whole_text(kind: tuple[str, Tokenizer, SegmentCache], pieces: list[str]) -> None:
    _, rust, cache = kind
    text = "".join(pieces)
    whole = rust.encode(text, add_special_tokens=False).ids
    assert cache.encode(text) == whole
    assert cache.encode(text) == whole, "from the cache"


def test_which_are_cut(kind: tuple[str, Tokenizer, SegmentCache]) -> None:
    name, _, cache = kind
    cache.encode("the worker<|im_end|> waits<|im_end|>")
    assert cache.tokens > 0 or name not in CUT


def test_it_keeps_what_was_asked_for_last() -> None:
    """A conversation that grows: only its last message is new."""
    rust = KINDS["ours"]()
    talk = "".join(f"<|im_start|>user\nmessage {n} of the talk<|im_end|>" for n in range(20))
    cache = SegmentCache(rust, tokens_max=100, short=0)
    for end in range(1, len(talk), 7):
        assert cache.encode(talk[:end]) == rust.encode(talk[:end], add_special_tokens=False).ids
        assert cache.tokens <= 100


def test_a_token_that_is_longer_than_the_special_one_is_not_cut() -> None:
    rust = with_more(AddedToken("<s>b", normalized=False))()
    cache = SegmentCache(rust, short=0)
    for text in ("<|im_end|>b", "<s>the", "<s>b"):
        assert cache.encode(text) == rust.encode(text, add_special_tokens=False).ids


def test_a_truncating_tokenizer_is_left_alone() -> None:
    rust = KINDS["ours"]()
    rust.enable_truncation(3)
    cache = SegmentCache(rust, short=0)
    text = "the worker<|im_end|>waits for tokens"
    assert cache.encode(text) == rust.encode(text, add_special_tokens=False).ids
    assert cache.tokens == 0
