"""Access to the page: one-time codes, cookies, tokens, and the rules for `Host` and `Origin`. Time is an argument.

A code stands in the fragment of the page's URL, which browsers never send. The page exchanges it for a cookie.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

COOKIE = "dynamo_page"
CODE_TTL_S = 600.0
"""A code that nobody has used for so long is forgotten."""
SESSION_TTL_S = 7 * 86400.0
CODES_MAX = 64
SESSIONS_MAX = 256
GUESSES_MAX = 30
"""So many wrong codes or passwords in `GUESS_WINDOW_S`; then none is looked at until the window is over."""
GUESS_WINDOW_S = 60.0
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class Session:
    """A viewer's session. Each act must show its `token`, which no other site can read."""

    cookie: str
    token: str
    until_s: float


@dataclass(slots=True)
class Sessions:
    """The codes and sessions of one run. They live in memory only, so they end with the process."""

    password: str | None = None
    """With one, a code alone opens nothing."""
    make: Callable[[], str] = lambda: secrets.token_urlsafe(32)
    _codes: dict[str, float] = field(default_factory=dict)
    _sessions: dict[str, Session] = field(default_factory=dict)
    _guesses: list[float] = field(default_factory=list)

    def new_code(self, now_s: float) -> str:
        """A code for one exchange."""
        code = self.make()
        self._codes[code] = now_s + CODE_TTL_S
        while len(self._codes) > CODES_MAX:
            del self._codes[next(iter(self._codes))]
        return code

    def exchange(self, code: str, now_s: float) -> Session | None:
        """The session for a code, once. None for a code that is wrong, used or old, and after too many wrong ones."""
        if self._too_many(now_s):
            return None
        found = next((each for each in self._codes if hmac.compare_digest(each.encode(), code.encode())), None)
        until_s = 0.0 if found is None else self._codes.pop(found)
        if now_s >= until_s:
            self._guesses.append(now_s)
            return None
        return self._begin(now_s)

    def log_in(self, password: str, now_s: float) -> Session | None:
        """The session for the password of the password file. None for a wrong one, or where there is none."""
        if self.password is None or self._too_many(now_s):
            return None
        if not hmac.compare_digest(self.password.encode(), password.encode()):
            self._guesses.append(now_s)
            return None
        return self._begin(now_s)

    def find(self, cookie: str | None, now_s: float) -> Session | None:
        """The live session of that cookie."""
        found = None if cookie is None else self._sessions.get(cookie)
        return found if found is not None and now_s < found.until_s else None

    def clear(self) -> None:
        """The run has ended, and so have its sessions."""
        self._codes.clear()
        self._sessions.clear()

    def _begin(self, now_s: float) -> Session:
        session = Session(self.make(), self.make(), now_s + SESSION_TTL_S)
        self._sessions[session.cookie] = session
        while len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        return session

    def _too_many(self, now_s: float) -> bool:
        self._guesses[:] = [at_s for at_s in self._guesses if now_s - at_s < GUESS_WINDOW_S]
        return len(self._guesses) >= GUESSES_MAX


def token_fits(session: Session, token: str | None) -> bool:
    """Whether an act shows the session's token."""
    return token is not None and hmac.compare_digest(session.token.encode(), token.encode())


def host_fits(host: str | None, allowed: Iterable[str]) -> bool:
    """Whether the header names this server. A name that an attacker's DNS points here is refused (DNS rebinding).

    `allowed` has the names without a port. The port may be another one: a forwarded port is the user's own.
    """
    return host is not None and _name(host) in set(allowed)


def origin_fits(origin: str | None, host: str | None) -> bool:
    """Whether a request that changes something comes from this page. A missing `Origin` is refused, too."""
    if origin is None or host is None:
        return False
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()


def _name(host: str) -> str:
    """`[::1]:80` -> `[::1]`, `localhost:80` -> `localhost`."""
    text = host.strip().lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return text.partition(":")[0]
