"""API keys: where they come from, and whether one that a client shows is among them. Pure.

Keys are kept as SHA-256 digests and compared in constant time with all of them, so that neither memory nor the time of
an answer says what a key is. They are random text of the user's own choosing, not passwords of people: no slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from dynamo_local.core.secrets import is_secret_variable

OPTION = "api_key"
KEYS_MAX = 1000
BYTES_MAX = 256 * 1024
"""Of all keys together."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[!-~]{8,512}")
"""It travels in a header: printable ASCII without spaces."""
_BEARER = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KeySource:
    """A file with one key a line, or a variable with several separated by commas or white space."""

    kind: Literal["file", "env"]
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def parse_source(text: str) -> KeySource:
    """`file:/etc/dynamo/keys` or `env:DYNAMO_API_KEYS`. Raises `ValueError` without the text: it may be a key."""
    kind, _, name = text.strip().partition(":")
    if not name or (kind != "file" and kind != "env"):
        raise ValueError("must be file:PATH or env:NAME, so that no key stands in a configuration or on a command line")
    if kind == "file":
        return KeySource("file", name)
    if not (_VARIABLE.fullmatch(name) and is_secret_variable(name)):
        raise ValueError(
            "env:NAME wants the name of a variable that has KEY, TOKEN, SECRET or PASSWORD in it: by these words it is "
            "masked wherever an environment is shown"
        )
    return KeySource("env", name)


@dataclass(frozen=True, slots=True)
class KeySet:
    """The digests of some keys."""

    digests: tuple[bytes, ...] = field(repr=False)

    def accepts(self, key: bytes) -> bool:
        """Whether it is one of them. Takes the same time for each key of one length."""
        digest = hashlib.sha256(key).digest()
        found = False
        for known in self.digests:
            found |= hmac.compare_digest(known, digest)
        return found


def parse_keys(text: str, source: KeySource) -> KeySet:
    """The keys of a file or variable. In a file a line that begins with # is a comment.

    Raises `ValueError`, without any of the text.
    """
    words = _lines(text) if source.kind == "file" else re.split(r"[\s,]+", text)
    keys = [word for word in words if word]
    if not keys:
        raise ValueError("holds no key; one a line")
    if len(keys) > KEYS_MAX:
        raise ValueError(f"holds {len(keys)} keys, at most {KEYS_MAX} are taken")
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            raise ValueError(f"its key {number} is none: 8 to 512 printable ASCII characters without spaces")
    return KeySet(tuple(dict.fromkeys(hashlib.sha256(key.encode()).digest() for key in keys)))


def _lines(text: str) -> Iterable[str]:
    return (line.strip() for line in text.splitlines() if not line.lstrip().startswith("#"))


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key in `Authorization: Bearer KEY`; None where there is none, or more than one such header."""
    given = [value for name, value in headers if name.lower() == b"authorization"]
    found = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
    return found[1] if found else None


def variable_of(text: Any) -> str | None:
    """The variable that an option's value names; None where it names none."""
    if not isinstance(text, str):
        return None
    try:
        source = parse_source(text)
    except ValueError:
        return None
    return source.name if source.kind == "env" else None
