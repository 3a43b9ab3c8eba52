"""Tests who may use a Frontend: keys, web pages of other origins, TLS, and what of it is refused before it listens."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from dynamo_local.components.openai import access
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.errors import ConfigError
from dynamo_local.system import key_files
from tests.drivers.served import auntil
from tests.tools.certificates import self_signed

Make = Callable[..., Any]
CHAT = {"model": "sim-Model", "messages": [{"role": "user", "content": "Hi"}]}
CHAT_URL = "/v1/chat/completions"
ORIGIN = "https://chat.example.org"


def key_file(folder: Path, *keys: str) -> Path:
    """As a user makes one."""
    path = folder / "keys"
    path.write_text("".join(f"{key}\n" for key in keys))
    path.chmod(0o600)
    return path


def shown(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def background() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """`background(work)` runs until the test ends."""
    tasks: list[asyncio.Task[None]] = []
    yield lambda work: tasks.append(asyncio.create_task(work))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def guarded(house: Make, tmp_path: Path) -> Any:
    """A Frontend that knows two keys."""
    return house(api_key=f"file:{key_file(tmp_path, 'first-key-1', 'second-key-2')}")


async def test_each_of_several_keys_is_taken(guarded: Any) -> None:
    """So that one can be replaced by the other."""
    async with guarded.client() as client:
        for key in ("first-key-1", "second-key-2"):
            assert (await client.post(CHAT_URL, json=CHAT, headers=shown(key))).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        shown("third-key-3"),
        shown("first-key-"),
        {"Authorization": "Basic Zmlyc3Qta2V5LTE="},
        {"Authorization": "first-key-1"},
        [("Authorization", "Bearer first-key-1"), ("Authorization", "Bearer other-key-9")],
    ],
)
async def test_without_a_known_key_it_is_a_401_in_openais_format(guarded: Any, headers: Any) -> None:
    async with guarded.client() as client:
        answer = await client.post(CHAT_URL, json=CHAT, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer ")
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert guarded.endpoint.payloads == []


async def test_only_the_health_pages_are_open(guarded: Any) -> None:
    async with guarded.client() as client:
        codes = {
            path: (await client.get(path)).status_code
            for path in ("/health", "/live", "/metrics", "/v1/models", "/v1/models/x", "/nowhere", "/health/", "/")
        }
    assert {path for path, code in codes.items() if code != 401} == {"/health", "/live"}


async def test_the_key_goes_no_further_than_the_door() -> None:
    """What is behind it (an HTTP server, a log of headers) never sees it."""
    seen: list[Any] = []

    class Open:
        def accepts(self, key: bytes) -> bool:
            return key == b"first-key-1"

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope["headers"])

    door = access.ApiKeyMiddleware(app, Open())  # type: ignore[arg-type]
    headers = [(b"authorization", b"bearer first-key-1"), (b"accept", b"*/*")]
    await door({"type": "http", "path": "/v1/models", "headers": headers}, None, None)  # type: ignore[arg-type]
    assert seen == [[(b"accept", b"*/*")]]


async def test_a_changed_file_is_read_again(
    guarded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Callable[..., Any]
) -> None:
    """Rotation: the new key comes in, the old one no more; no restart, and no moment without a key."""
    monkeypatch.setattr(key_files, "LOOK_EVERY_S", 0.01)
    keys = guarded.deps.keys
    background(keys.follow())
    assert keys.accepts(b"first-key-1")
    key_file(tmp_path, "second-key-2", "third-key-3")
    await auntil(lambda: keys.accepts(b"third-key-3"))
    assert (keys.accepts(b"first-key-1"), keys.accepts(b"second-key-2")) == (False, True)


@pytest.mark.parametrize("spoil", ["empty", "gone", "open", "binary"])
async def test_a_spoilt_file_keeps_the_last_good_keys(
    guarded: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    background: Callable[..., Any],
    spoil: str,
) -> None:
    """Half a rotation locks nobody out and lets nobody in; the log says what is wrong, without a key."""
    monkeypatch.setattr(key_files, "LOOK_EVERY_S", 0.01)
    keys, path = guarded.deps.keys, tmp_path / "keys"
    background(keys.follow())
    if spoil == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "open": b"third-key-3\n", "binary": b"\xff\xfe-third-key-3"}[spoil])
        path.chmod(0o644 if spoil == "open" else 0o600)
    await auntil(lambda: "the keys of before stay valid" in caplog.text)
    assert (keys.accepts(b"first-key-1"), keys.accepts(b"third-key-3"), keys.accepts(b"")) == (True, False, False)
    assert "third-key-3" not in caplog.text
    key_file(tmp_path, "fourth-key-4")
    await auntil(lambda: keys.accepts(b"fourth-key-4"))


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (None, 0o600, "cannot be read: No such file"),
        ("", 0o600, "holds no key"),
        ("# only a comment\n\n", 0o600, "holds no key"),
        ("good-key-1\nse cret-words\n", 0o600, "its key 2 is none"),
        ("short\n", 0o600, "its key 1 is none"),
        ("good-key-1\n", 0o644, "can be read by everybody"),
        ("good-key-{}\n" * 1001, 0o600, "at most 1000"),
        ("x" * 300_000, 0o600, "larger than"),
    ],
)
def test_a_file_that_holds_no_good_keys_is_told_in_one_line(tmp_path: Path, text: str | None, mode: int, why: str):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"^Frontend\.api-key: the file {path} .*{why}") as told:
        access.load_keys(FrontendConfig(api_key=f"file:{path}"), {})
    assert "\n" not in str(told.value)
    assert "se cret" not in str(told.value)


def test_a_fifo_in_place_of_the_file_is_refused_at_once(tmp_path: Path) -> None:
    """Reading one would wait for a writer for ever."""
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(ConfigError, match="is no plain file"):
        access.load_keys(FrontendConfig(api_key=f"file:{tmp_path / 'keys'}"), {})


def test_keys_of_the_environment_are_taken_out_of_it() -> None:
    environ = {"DYNAMO_API_KEYS": "first-key-1, second-key-2\nthird-key-3", "PATH": "/bin"}
    keys = access.take_keys(FrontendConfig(api_key="env:DYNAMO_API_KEYS"), environ)
    assert keys is not None
    assert all(keys.accepts(key) for key in (b"first-key-1", b"second-key-2", b"third-key-3"))
    assert environ == {"PATH": "/bin"}
    with pytest.raises(ConfigError, match=r"Frontend\.api-key: the variable DYNAMO_API_KEYS is not set"):
        access.load_keys(FrontendConfig(api_key="env:DYNAMO_API_KEYS"), environ)


def test_no_key_is_in_memory_as_it_is(tmp_path: Path) -> None:
    keys = access.load_keys(FrontendConfig(api_key=f"file:{key_file(tmp_path, 'first-key-1')}"), {})
    assert "first-key-1" not in repr(vars(keys))


@pytest.mark.parametrize("value", ["sk-1234567890", "env:PLAIN", "env:A-KEY", "keys.txt", "FILE:/x"])
def test_a_key_itself_is_refused_as_an_option(value: str) -> None:
    """It would stand in argv, in the statefile and in `--dry-run`. The message does not repeat it."""
    with pytest.raises(ValidationError, match=r"file:PATH or env:NAME|env:NAME wants") as told:
        FrontendConfig(api_key=value)
    assert value not in told.value.errors()[0]["msg"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "gpu-host.example.org"])
def test_beyond_this_machine_it_wants_keys_or_a_word(host: str) -> None:
    with pytest.raises(ValidationError, match=r"api-key: file:PATH or env:NAME.*--insecure"):
        FrontendConfig(host=host)
    assert FrontendConfig(host=host, insecure=True).host == host
    assert FrontendConfig(host=host, api_key="file:/keys").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_this_machine_it_wants_none(host: str) -> None:
    assert FrontendConfig(host=host).api_key is None


def test_what_is_open_to_others_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for settings, words in (({"insecure": True}, "no credentials"), ({"api_key": "file:/keys"}, "in the clear")):
        caplog.clear()
        access.listening_socket(FrontendConfig(host="0.0.0.0", port=0, **settings)).close()
        assert words in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        access.listening_socket(FrontendConfig(port=0)).close()
    assert caplog.text == ""


async def test_no_web_page_may_call_by_default(house: Make) -> None:
    """A browser keeps the answer from a page that no header lets in, and asks before it sends JSON."""
    async with house().client() as client:
        preflight = await client.options(CHAT_URL, headers=_preflight())
        answer = await client.post(CHAT_URL, json=CHAT, headers={"Origin": ORIGIN})
    assert preflight.status_code == 405
    assert not [name for reply in (preflight, answer) for name in reply.headers if name.startswith("access-control")]


def _preflight(origin: str = ORIGIN) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }


async def test_pages_of_a_listed_origin_may_call(house: Make, tmp_path: Path) -> None:
    made = house(cors_origins=[ORIGIN], api_key=f"file:{key_file(tmp_path, 'first-key-1')}")
    async with made.client() as client:
        assert (await client.options(CHAT_URL, headers=_preflight())).headers["access-control-allow-origin"] == ORIGIN
        stranger = await client.options(CHAT_URL, headers=_preflight("https://evil.example"))
        assert "access-control-allow-origin" not in stranger.headers
        for headers, code in (({}, 401), (shown("first-key-1"), 200)):
            answer = await client.post(CHAT_URL, json=CHAT, headers={"Origin": ORIGIN, **headers})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (code, ORIGIN)


@pytest.mark.parametrize("origin", ["chat.example.org", "https://x.org/path", "ftp://x.org", 3])
def test_what_is_no_origin_is_refused(origin: Any) -> None:
    """A browser would never send it, so it would let nobody in."""
    with pytest.raises(ValidationError, match="must be a list of origins"):
        FrontendConfig(cors_origins=[origin])


async def test_tls_serves_https_alone(house: Make, tmp_path: Path) -> None:
    """The certificate is the user's; whoever speaks plain HTTP gets nothing."""
    cert, key = self_signed(tmp_path)
    made = house(tls_cert=str(cert), tls_key=str(key))
    async with made.served() as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(base_url=server.url, verify=trusting) as client:
            assert (await client.post(CHAT_URL, json=CHAT)).status_code == 200
        async with httpx.AsyncClient(base_url=server.url.replace("https", "http")) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/live")


def test_certificates_that_cannot_be_used_are_told_in_one_line(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, "one")
    _, other = self_signed(tmp_path, "two")
    _, locked = self_signed(tmp_path, "three", passphrase="x" * 8)
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("no PEM")
    cases = [
        (tmp_path / "none", key, r"Frontend\.tls-cert: .*none cannot be read: No such file"),
        (cert, tmp_path / "none", r"Frontend\.tls-key: .*none cannot be read: No such file"),
        (nonsense, key, "cannot be used"),
        (cert, other, "cannot be used"),
        (cert, locked, "cannot be used.*passphrase"),
    ]
    for one, two, why in cases:
        with pytest.raises(ConfigError, match=why) as told:
            access.check(FrontendConfig(tls_cert=str(one), tls_key=str(two)), {}, "Frontend")
        assert "\n" not in str(told.value)
    with pytest.raises(ValidationError, match="tls-cert is given without tls-key"):
        FrontendConfig(tls_cert=str(cert))
