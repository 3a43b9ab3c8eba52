"""Token ids to text as they come: whole characters only, and nothing of a stop string.

Two decoders give the same text as one `decode` of all ids:

* byte-level BPE (GPT-2, Llama 3, Qwen): each token *is* a byte string, so a table and an incremental
  UTF-8 decoder suffice. An incomplete character waits for its other bytes; invalid bytes become U+FFFD
  at once, as in the one-shot decode.
* all others (SentencePiece, WordPiece, byte fallback): the prefix-offset method of text-generation-inference and vLLM
  (`detokenizer_utils.py`). It decodes a short window with and without the new ids. The difference is new text unless it
  ends in U+FFFD.

Stop strings are matched as if characters came one at a time (the first to be *complete* wins), so the
result does not depend on how tokens were batched.
"""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

MAX_BYTES_PER_CHAR = 4
"""UTF-8 needs at most four bytes, hence at most four byte-fallback tokens, for one character."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _gpt2_bytes() -> dict[str, int]:
    """The byte-to-character table of GPT-2 (`bytes_to_unicode` in openai/gpt-2 `encoder.py`), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    table.update({chr(256 + n): b for n, b in enumerate(others)})
    return table


def _is_byte_level(rust: RustTokenizer) -> bool:
    decoder = json.loads(rust.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return bool(parts) and all(part.get("type") == "ByteLevel" for part in parts)


class TokenTable:
    """The part of a tokenizer that decoders need. It is made once and shared by all requests."""

    def __init__(self, rust: RustTokenizer, *, keep_special: bool = False) -> None:
        self._rust = rust
        self._skip = not keep_special
        self.pieces: dict[int, bytes] | None = self._byte_pieces() if _is_byte_level(rust) else None

    def _byte_pieces(self) -> dict[int, bytes]:
        char_to_byte = _gpt2_bytes()
        special = {i for i, token in self._rust.get_added_tokens_decoder().items() if token.special and self._skip}
        pieces: dict[int, bytes] = {}
        for text, token_id in self._rust.get_vocab(with_added_tokens=True).items():
            if token_id in special:
                pieces[token_id] = b""
                continue
            codes = [char_to_byte.get(char) for char in text]
            # Like the library's ByteLevel decoder: a token with a character outside the table is plain text.
            pieces[token_id] = text.encode() if None in codes else bytes(c for c in codes if c is not None)
        return pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without special ones unless they are kept."""
        return str(self._rust.decode(list(token_ids), skip_special_tokens=self._skip))

    def decoder(self) -> Decoder:
        """A fresh decoder of the right kind."""
        return ByteDecoder(self.pieces) if self.pieces is not None else WindowDecoder(self.decode)


class Decoder(Protocol):
    """Ids in, whole characters out."""

    def feed(self, token_ids: Sequence[int], final: bool = False) -> str:
        """The characters that these tokens complete; with `final`, what is left as well."""
        ...

    def fork(self) -> Self:
        """A copy at the same place, which goes on by itself."""
        ...


class ByteDecoder:
    """Byte-level BPE: join the bytes, decode what is complete."""

    def __init__(self, pieces: dict[int, bytes], state: tuple[bytes, int] | None = None) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if state is not None:
            self._utf8.setstate(state)

    def feed(self, token_ids: Sequence[int], final: bool = False) -> str:
        get = self._pieces.get
        return self._utf8.decode(b"".join([get(token, b"") for token in token_ids]), final)

    def fork(self) -> ByteDecoder:
        return ByteDecoder(self._pieces, self._utf8.getstate())


class WindowDecoder:
    """The prefix-offset method for decoders whose output depends on neighbouring tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # ids of the window whose text was given out
        self._read_text = ""

    def feed(self, token_ids: Sequence[int], final: bool = False) -> str:
        self._window.extend(token_ids)
        end, text = self._whole_characters(final)
        new = text[len(self._read_text) :]
        if new:
            # Keep what was just read as the context of the next piece (SentencePiece's leading spaces).
            self._window = self._window[self._read :]
            self._read = end - self._read
            self._read_text = self._decode(self._window[: self._read])
        return new

    def _whole_characters(self, final: bool) -> tuple[int, str]:
        """(ids that may be read, their text): the last ones wait where they end amid a character."""
        full = len(self._window)
        whole = self._decode(self._window)
        if final or not whole.endswith(REPLACEMENT):
            return full, whole
        for end in range(full - 1, full - MAX_BYTES_PER_CHAR, -1):
            if end <= self._read:
                return self._read, self._read_text
            text = self._decode(self._window[:end])
            if not text.endswith(REPLACEMENT):
                return end, text
        return full, whole  # more than an incomplete character: the bytes are invalid, and shown as such

    def fork(self) -> WindowDecoder:
        twin = WindowDecoder(self._decode)
        twin._window, twin._read, twin._read_text = list(self._window), self._read, self._read_text
        return twin


class Piece(NamedTuple):
    """The result of a batch of tokens. `num_tokens` of them count. `stopped`: a stop string was complete."""

    text: str
    num_tokens: int
    stopped: bool = False


class _StopString:
    """One stop string, and the table of Knuth, Morris and Pratt: after a mismatch, how much still matches.

    The table is made as far as a text has matched, so that a long string that never begins costs nothing.
    """

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = array("I", (0,))  # of text[: n + 1]: the longest proper beginning that is its end, too

    def advance(self, matched: int, char: str) -> int:
        """How many characters of the stop string are the end of the text, once `char` came behind `matched`."""
        while matched and self.text[matched] != char:
            matched = self._border(matched)
        return matched + (self.text[matched] == char)

    def _border(self, length: int) -> int:
        borders, text = self._borders, self.text
        while len(borders) < length:
            char, border = text[len(borders)], borders[-1]
            while border and text[border] != char:
                border = borders[border - 1]
            borders.append(border + (text[border] == char))
        return borders[length - 1]


class StopMatcher:
    """Holds text back just as far as a stop string might still match. Its memory is linear in the stop strings."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        self._stop = tuple(_StopString(s) for s in dict.fromkeys(stop) if s)
        self.active = bool(self._stop)
        self._include = include_stop
        self._held = ""
        self._matched = [0] * len(self._stop)
        self._first_chars = frozenset(s.text[0] for s in self._stop)

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is certain, whether a stop string was complete)."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, False
        before, text = len(self._held), self._held + text
        for end in range(before + 1, len(text) + 1):
            # The first to be complete; of those that end together the longest, which starts first.
            if length := self._advance(text[end - 1]):
                self._held = ""
                return text[: end if self._include else end - length], True
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _advance(self, char: str) -> int:
        """One character more; the length of the longest stop string that it completes, else 0."""
        longest = 0
        for n, stop in enumerate(self._stop):
            matched = self._matched[n] = stop.advance(self._matched[n], char)
            if matched == len(stop.text):
                longest = max(longest, matched)
        return longest

    def flush(self) -> str:
        """The text that was held back: no more will come, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> StopMatcher:
        """A copy at the same place, which goes on by itself."""
        twin = StopMatcher(())
        twin.__dict__.update(self.__dict__)
        twin._matched = list(self._matched)
        return twin


class Detokenizer:
    """One response's text. Feed batches of token ids; `finish()` once after the last.

    Text of the first `min_tokens` tokens is not searched for stop strings (vLLM's rule).
    """

    def __init__(
        self, table: TokenTable, stop: Sequence[str] = (), min_tokens: int = 0, include_stop: bool = False
    ) -> None:
        self._decoder: Decoder = table.decoder()
        self._matcher = StopMatcher(stop, include_stop)
        self._unsearched = min_tokens if stop else 0

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """The new text of these tokens; do not call it again after `stopped`."""
        head = ""
        skipped = min(self._unsearched, len(token_ids))
        if skipped:
            self._unsearched -= skipped
            head = self._decoder.feed(token_ids[:skipped])
            token_ids = token_ids[skipped:]
            if not token_ids:
                return Piece(head, skipped)
        if not self._matcher.active:
            return Piece(head + self._decoder.feed(token_ids), skipped + len(token_ids))
        decoder, matcher = self._decoder.fork(), self._matcher.fork()
        text, stopped = self._matcher.feed(self._decoder.feed(token_ids))
        used = _tokens_to_stop(decoder, matcher, token_ids) if stopped else len(token_ids)
        return Piece(head + text, skipped + used, stopped)

    def finish(self) -> Piece:
        """The held back text: the start of no stop string, and an incomplete character as U+FFFD."""
        text, stopped = self._matcher.feed(self._decoder.feed((), final=True))
        return Piece(text + ("" if stopped else self._matcher.flush()), 0, stopped)


def _tokens_to_stop(decoder: Decoder, matcher: StopMatcher, token_ids: Sequence[int]) -> int:
    """How many of the batch's tokens were needed to complete the stop string."""
    for used, token in enumerate(token_ids, start=1):
        if matcher.feed(decoder.feed((token,)))[1]:
            return used
    return len(token_ids)
