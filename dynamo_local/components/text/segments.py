"""Token ids of texts that come again: the system prompt, and the earlier messages of a conversation.

A text is cut behind each special token, such as `<|im_end|>`. A tokenizer takes these out before anything else, so each
segment has the same ids by itself. The cache keeps the ids of segments. (Dynamo's and SMG's caches cut at the same
places, and keep whole prefixes.) Where a tokenizer treats the start of a text specially, nothing is cut.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain, groupby, pairwise

from tokenizers import Tokenizer as RustTokenizer

TOKENS_MAX = 8_000_000
"""Token ids that are kept, of four bytes each. The segments that were not asked for longest go first."""
SHORT = 512
"""Characters below which a text is tokenised as a whole: to look its segments up would take as long."""
PROBES = ("word", " word", "\nword", "  two  words ", "1,024\n\n", "é", "")


def token_ids(rust: RustTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The ids of the whole text. Other threads run meanwhile: of the library's calls, those for a batch let them."""
    return list(rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


class SegmentCache:
    """The ids of texts, segment by segment. Safe to use from several threads."""

    def __init__(self, rust: RustTokenizer, tokens_max: int = TOKENS_MAX, short: int = SHORT) -> None:
        self._rust = rust
        self._short = short
        self._tokens_max = tokens_max
        self._special, other = _taken_out(rust)
        longest = sorted(self._special | other, key=len, reverse=True)  # the library takes the longest at each place
        self._cut = re.compile("|".join(map(re.escape, longest))) if self._special else None
        self._special_ids = {rust.token_to_id(each) for each in self._special}
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.tokens = 0
        """Token ids that are kept now."""

    def encode(self, text: str) -> list[int]:
        """The ids of the text, without special tokens that it does not have."""
        segments = self._segments(text) if len(text) >= self._short else [text]
        if len(segments) < 2:
            return token_ids(self._rust, text)
        keys = [blake2b(segment.encode("utf-8", "surrogatepass"), digest_size=16).digest() for segment in segments]
        whole: list[int] = []
        # Neighbours that are new are one text for the tokenizer: a call for each would cost more.
        found = zip(keys, segments, self._known(keys), strict=True)
        for is_known, group in groupby(found, lambda each: each[2] is not None):
            if is_known:
                whole += chain.from_iterable(ids for _, _, ids in group if ids is not None)
            else:
                new = [(key, segment) for key, segment, _ in group]
                ids = token_ids(self._rust, "".join(segment for _, segment in new))
                self._keep([key for key, _ in new], ids)
                whole += ids
        return whole

    def _segments(self, text: str) -> list[str]:
        if self._cut is None:
            return [text]
        ends = [match.end() for match in self._cut.finditer(text) if match.group() in self._special]
        return [text[begin:end] for begin, end in pairwise([0, *ends, len(text)]) if begin < end] or [text]

    def _known(self, keys: Sequence[bytes]) -> list[array[int] | None]:
        with self._lock:
            for key in keys:
                if key in self._ids:
                    self._ids.move_to_end(key)
            return [self._ids.get(key) for key in keys]

    def _keep(self, keys: Sequence[bytes], ids: Sequence[int]) -> None:
        """`ids` are those of the segments with these keys, one behind the other."""
        ends = [at + 1 for at, one in enumerate(ids) if one in self._special_ids]
        if not ends or ends[-1] != len(ids):
            ends.append(len(ids))
        if len(ends) != len(keys):
            return  # a model makes such an id of other text, too
        with self._lock:
            for key, (begin, end) in zip(keys, pairwise([0, *ends]), strict=True):
                if key not in self._ids:
                    self._ids[key] = array("i", ids[begin:end])
                    self.tokens += end - begin
            while self.tokens > self._tokens_max:
                self.tokens -= len(self._ids.popitem(last=False)[1])


def _taken_out(rust: RustTokenizer) -> tuple[set[str], set[str]]:
    """The tokens that the tokenizer takes out of a text before anything else: special ones to cut behind, and the
    others. There are none of the first where nothing may be cut."""
    special, other = set[str](), set[str]()
    for token in rust.get_added_tokens_decoder().values():
        if token.normalized or not token.content:
            continue  # looked for in what lies between the others
        plain = token.special and not (token.lstrip or token.rstrip or token.single_word)
        (special if plain else other).add(token.content)
    cuts = rust.truncation is None and rust.padding is None and not rust.encode_special_tokens
    return (special, other) if special and cuts and _alike(rust, min(special)) else (set(), other)


def _alike(rust: RustTokenizer, special: str) -> bool:
    """Whether texts behind that token have the ids that they have by themselves."""
    tails = {tail: token_ids(rust, tail) for tail in (*PROBES, special)}
    for probe in PROBES:
        head = f"{probe}{special}"
        ids = token_ids(rust, head)
        if any(token_ids(rust, head + tail) != ids + tail_ids for tail, tail_ids in tails.items()):
            return False
    return True
