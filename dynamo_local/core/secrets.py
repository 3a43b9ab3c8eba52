"""Environment variables of a worker, API keys, and masks for values that people see.

Dynamo's former manager put its whole environment, tokens included, on the command line and into the statefile. Here a
worker sees an allow-list, and shown values are masked.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

MASK = "****"

ALLOWED_ENV = (
    "PATH",
    "HOME",
    "LANG",
    "LC_*",
    "LD_LIBRARY_PATH",
    "CUDA_*",
    "NCCL_*",
    "UCX_*",
    "VLLM_*",
    "HF_*",
    "OMP_*",
    "PYTHON*",
    "*_proxy",
    "*_PROXY",
    "DYN_*",
    "ETCD_*",
    "NATS_*",
    "OTEL_*",
)
"""Names and globs of issue 2, item 5. Proxies are written in either case, and tools read either."""

NEVER_INHERITED = frozenset({"DYN_DEPLOYMENT_CONFIG"})
"""The whole configuration, every service's `envs` among it: a worker gets what is merged and its own instead."""

_SECRET_ENV = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|^OTEL_.*HEADERS$", re.IGNORECASE)
"""The last are headers to a receiver of traces: its key is among them."""
_SECRET_WORDS = frozenset({"token", "key", "apikey", "secret", "secrets", "password"})
_USERINFO = re.compile(r"(?<=://)[^/@\s,]+(?=@)")
_IN_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=bearer )\S+|(?<=basic )[A-Za-z0-9+/=]{8,}"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[a-z]_[A-Za-z0-9]{20,})"
    r"|(?:(?<=token)|(?<=api[_-]key)|(?<=secret)|(?<=password))(?P<is>[\"']?\s{0,2}[=:]\s{0,2}[\"']?)[^\s\"',;}&]{6,}",
    re.IGNORECASE | re.DOTALL,
)
"""Secrets that a log may show: private keys, headers, tokens of known forms, and values of names that say so."""
SECRET_CHARS_MIN = 8
"""A shorter value of a variable is not looked for in texts: `1` or `true` is in all of them."""


def allowed_env(environ: Mapping[str, str], pass_env: Iterable[str] = ()) -> dict[str, str]:
    """The part of `environ` that a worker inherits: `ALLOWED_ENV`, and names or globs of `pass_env`."""
    named = tuple(pass_env)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatchcase(name, pattern) for pattern in named)
        or (name not in NEVER_INHERITED and any(fnmatchcase(name, pattern) for pattern in ALLOWED_ENV))
    }


def mask_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables as they may be shown: secrets, and credentials inside URLs and JSON objects, become `****`."""
    return {name: MASK if value and is_secret_variable(name) else mask_text(value) for name, value in environ.items()}


def is_secret_variable(name: str) -> bool:
    """Does an environment variable's name say that it holds a secret?"""
    return _SECRET_ENV.search(name) is not None


def mask_text(value: str) -> str:
    """Mask what may be secret inside one value: `nats://user:pass@host`, or a JSON object's secret keys."""
    if value.startswith("{"):
        try:
            parsed = json.loads(value)
        except ValueError:
            pass  # not JSON after all: only its URLs can be recognised
        else:
            return json.dumps(mask_config(parsed))
    return _USERINFO.sub(MASK, value)


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values of the variables whose names say that they hold a secret, the longest first."""
    found = {value for name, value in environ.items() if is_secret_variable(name) and len(value) >= SECRET_CHARS_MIN}
    return tuple(sorted(found, key=len, reverse=True))


def mask_log(text: str, secrets: Iterable[str] = ()) -> str:
    """A text that a program wrote, such as a log, with those secrets masked, and all that looks like one."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return _IN_TEXT.sub(lambda match: (match["is"] or "") + MASK, _USERINFO.sub(MASK, text))


def holds_secret(value: str) -> bool:
    """Whether `mask_text` finds something to mask in it."""
    masked = mask_text(value)
    if masked == value:
        return False
    try:
        return bool(json.loads(masked) != json.loads(value))  # JSON that was only written anew
    except ValueError:
        return True


def mask_config(config: Any) -> Any:
    """A copy of a configuration (JSON types) as it may be shown.

    An `envs` mapping is masked like an environment. Elsewhere whole words decide: `api-key` is secret, but
    `tokenizer` and `max-num-batched-tokens` are not, and a number such as `token_low: 100` is no token.
    """
    if isinstance(config, Mapping):
        return {key: _mask_item(str(key), value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [mask_config(value) for value in config]
    return mask_text(config) if isinstance(config, str) else config


def is_secret_key(key: str) -> bool:
    """Does a configuration key name a secret?"""
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()))


def _mask_item(key: str, value: Any) -> Any:
    if key == "envs" and isinstance(value, Mapping):
        return mask_env({str(name): str(text) for name, text in value.items()})
    if is_secret_key(key) and (isinstance(value, str) or "password" in key.lower() or "secret" in key.lower()):
        return MASK if value not in ("", None) else value
    return mask_config(value)


# --- api_keys
# API keys: where they come from, and whether one that a client shows is among them. Pure.
#
# Keys are kept as SHA-256 digests and compared in constant time with all of them, so that neither memory nor the time
# of
# an answer says what a key is. They are random text of the user's own choosing, not passwords of people: no slow
# hash.

OPTION = "api_key"
KEYS_MAX = 1000
BYTES_MAX = 256 * 1024
"""Largest size of all keys together, bytes."""

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
    parts = _lines(text) if source.kind == "file" else re.split(r"[\s,]+", text)
    keys = [word for word in parts if word]
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
