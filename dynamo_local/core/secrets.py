"""Which environment variables a worker may see, and how values are shown to people.

The predecessor put the manager's whole environment, tokens included, on the command line and into the
statefile (lesson 11). Here a worker sees an allow-list, and whatever is shown goes through a mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

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
)
"""Names and globs of issue 2, item 5. Proxies are written in either case, and tools read either."""

NEVER_INHERITED = frozenset({"DYN_DEPLOYMENT_CONFIG"})
"""The whole configuration, every service's `envs` among it: a worker gets what is merged and its own instead."""

_SECRET_ENV = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
_SECRET_WORDS = frozenset({"token", "key", "apikey", "secret", "secrets", "password"})
_USERINFO = re.compile(r"(?<=://)[^/@\s,]+(?=@)")


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
