"""An entry on the server: its headers, its subject, and the fields of a dead letter."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

log = logging.getLogger(__name__)

RUN, ID, EXPIRES = "Dynamo-Run-Id", "Dynamo-Request-Id", "Dynamo-Expires-At"
ATTEMPTS, REASON, DIED = "Dynamo-Attempts", "Dynamo-Reason", "Dynamo-Died-At"
START_BY = "Dynamo-Start-By"
"""When its prefill has to begin for its target to be kept, Unix seconds; absent: there is no target."""
BEFORE = "Dynamo-Attempts-Before"
"""Deliveries to workers before the entry went to the second line."""
X_REQUEST_ID = "Dynamo-X-Request-Id"
"""The client's id, for the logs of prefill workers; absent from entries of an older version."""
MSG_ID = "Nats-Msg-Id"
_PLAIN_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry that was given up. `attempts` counts deliveries to workers, `died_at_s` is Unix seconds."""

    request_id: str
    run_id: str
    attempts: int
    reason: str
    died_at_s: float


def subject_token(name: str) -> str:
    """`name` as one token of a NATS subject: as it is where it can be, else its hash."""
    return name if _PLAIN_TOKEN.fullmatch(name) else "=" + hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def number_of(text: str | None) -> float | None:
    """A header's number; None if it is absent or not a number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def dead_letter_of(headers: Mapping[str, str]) -> DeadLetter | None:
    """The dead letter in these headers; None if they are not ours."""
    attempts, died_at_s = number_of(headers.get(ATTEMPTS)), number_of(headers.get(DIED))
    if attempts is None or died_at_s is None:
        log.warning("a dead letter without our headers is left out: %s", dict(headers))
        return None
    request_id, run_id, reason = (unquote(headers.get(name, "?")) for name in (ID, RUN, REASON))
    return DeadLetter(request_id, run_id, int(attempts), reason, died_at_s)
