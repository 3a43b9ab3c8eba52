"""The rules of access to the page: codes, sessions, tokens, `Host` and `Origin`."""

from __future__ import annotations

from itertools import count

import pytest

from dynamo_local.dashboard import sessions as rules
from dynamo_local.dashboard.sessions import Sessions


def made(password: str | None = None) -> Sessions:
    numbers = count()
    return Sessions(password, make=lambda: f"secret-{next(numbers)}")


def test_a_code_opens_one_session() -> None:
    sessions = made()
    code = sessions.new_code(0.0)
    session = sessions.exchange(code, 1.0)
    assert session is not None
    assert sessions.find(session.cookie, 2.0) == session
    assert sessions.exchange(code, 2.0) is None


def test_an_old_code_opens_nothing() -> None:
    sessions = made()
    code = sessions.new_code(0.0)
    assert sessions.exchange(code, rules.CODE_TTL_S) is None


def test_a_session_ends_with_its_time_and_with_the_run() -> None:
    sessions = made()
    session = sessions.exchange(sessions.new_code(0.0), 0.0)
    assert session is not None
    assert sessions.find(session.cookie, rules.SESSION_TTL_S) is None
    sessions.clear()
    assert sessions.find(session.cookie, 1.0) is None


def test_after_many_wrong_codes_a_right_one_must_wait() -> None:
    sessions = made()
    code = sessions.new_code(0.0)
    for _ in range(rules.GUESSES_MAX):
        assert sessions.exchange("wrong", 0.0) is None
    assert sessions.exchange(code, 1.0) is None
    assert sessions.exchange(code, rules.GUESS_WINDOW_S) is not None


def test_a_password_is_asked_where_there_is_one() -> None:
    sessions = made("correct horse")
    assert sessions.log_in("battery", 0.0) is None
    assert sessions.log_in("correct horse", 0.0) is not None
    assert made().log_in("", 0.0) is None


def test_an_act_needs_the_token_of_its_own_session() -> None:
    sessions = made()
    one, other = (sessions.exchange(sessions.new_code(0.0), 0.0) for _ in range(2))
    assert one is not None
    assert other is not None
    assert rules.token_fits(one, one.token)
    assert not rules.token_fits(one, other.token)
    assert not rules.token_fits(one, None)


@pytest.mark.parametrize("host", ["localhost:80", "127.0.0.1", "127.0.0.1:8790", "[::1]:80", "LOCALHOST"])
def test_a_loopback_name_fits(host: str) -> None:
    assert rules.host_fits(host, rules.LOOPBACK_NAMES)


@pytest.mark.parametrize("host", [None, "", "evil.example", "127.0.0.1.evil.example:80", "localhost.evil", "[::2]:80"])
def test_another_name_does_not_fit(host: str | None) -> None:
    """A name of an attacker's that resolves to 127.0.0.1 (DNS rebinding)."""
    assert not rules.host_fits(host, rules.LOOPBACK_NAMES)


@pytest.mark.parametrize(
    ("origin", "fits"),
    [
        ("http://127.0.0.1:80", True),
        ("https://127.0.0.1:80", True),
        (None, False),
        ("null", False),
        ("http://evil.example", False),
        ("http://127.0.0.1:81", False),
        ("file://127.0.0.1:80", False),
    ],
)
def test_a_change_comes_from_the_page_itself(origin: str | None, fits: bool) -> None:
    assert rules.origin_fits(origin, "127.0.0.1:80") is fits
