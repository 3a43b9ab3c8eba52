"""Which names a namespace may have. One place says it: the command line, a graph's declaration and paths ask here."""

from __future__ import annotations

import re

NAMESPACE_MAX = 64
"""It is a part of file names, of watcher names and of a unix socket's path."""
RESERVED = {
    "gpus": "the folder of the GPUs' locks, in releases before this one",
    "v1": "the root of Dynamo 1.x's keys in etcd",
}
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def namespace_fault(namespace: object) -> str | None:
    """Why this cannot be a namespace, in words; None if it can."""
    what = f"namespace {str(namespace)[: NAMESPACE_MAX + 1]!r}"
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        return f"{what} is not usable: begin with a letter or a digit, then letters, digits, '_' and '-'"
    if len(namespace) > NAMESPACE_MAX:
        return f"{what}… is not usable: it has {len(namespace)} characters, {NAMESPACE_MAX} are allowed"
    if namespace.lower() in RESERVED:
        return f"{what} is reserved: it is {RESERVED[namespace.lower()]}; choose another name"
    return None
