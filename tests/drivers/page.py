"""A viewer of the page: exchanges a code for a session, asks the API, and follows the stream."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.drivers.served import Served, until

TIMEOUT_S = 30.0


class Viewer:
    """One session. `link` is what `dynamo dashboard --print-url` prints."""

    def __init__(self, link: str) -> None:
        address = urlsplit(link)
        self.origin = f"{address.scheme}://{address.netloc}"
        self._port = address.port or 80
        self._headers: dict[str, str] = {}
        self._last: str | None = None
        self.state: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        status, _, headers = self.ask("POST", "/api/session", {"code": address.fragment.removeprefix("code=")})
        assert status == 204
        self.cookie = headers["set-cookie"]
        self._headers["cookie"] = self.cookie.partition(";")[0]
        self._headers["x-dynamo-token"] = str(self.get("/api/session")["token"])

    def ask(self, method: str, path: str, body: Any = None, **more: str | None) -> tuple[int, Any, Mapping[str, str]]:
        """`(status, body, headers)`. A header of None is left out; `_` in a name is `-`."""
        headers: dict[str, str | None] = {"origin": self.origin, **self._headers}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            sent = {name: value for name, value in headers.items() if value is not None}
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            answer = connection.getresponse()
            data = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
            is_json = found.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(data) if is_json else data, found
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, body, _ = self.ask("GET", path)
        assert status == 200, body
        return body

    def raw(self, path: str) -> bytes:
        """The answer's bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers=self._headers)
            return connection.getresponse().read()
        finally:
            connection.close()

    def act(self, **body: Any) -> Any:
        status, answer, _ = self.ask("POST", "/api/acts", body)
        assert status == 200, answer
        return answer

    def follow(self) -> None:
        """Take what is new, by the poll."""
        for event in self.get(f"/api/poll?after={self._last or ''}")["events"]:
            self._last = event["id"]
            if event["event"] == "snapshot":
                self.state = event["data"]["state"]
            elif event["event"] == "state":
                self.state = patched(self.state, event["data"])
            self.events.append(event)

    def await_state(self, condition: Callable[[dict[str, Any]], Any], timeout_s: float = 30.0) -> None:
        def holds() -> bool:
            self.follow()
            return bool(condition(self.state))

        until(holds, timeout_s, what=lambda: self.state)

    def await_event(self, kind: str, condition: Callable[[Any], Any], timeout_s: float = 30.0) -> dict[str, Any]:
        """The data of the first such event since the beginning."""

        def found() -> dict[str, Any] | None:
            self.follow()
            return next(
                (each["data"] for each in self.events if each["event"] == kind and condition(each["data"])), None
            )

        data = until(found, timeout_s, what=lambda: [each["event"] for each in self.events][-30:])
        assert data is not None
        return data


def link_of(served: Served) -> str:
    """A new link of the page that the graph serves."""
    return served.ok("dashboard", "--print-url", "-n", served.namespace).strip()


@contextmanager
def readers(links: Iterable[str]) -> Iterator[list[int]]:
    """A viewer for each link, which reads the stream in a thread until the block ends. Gives the events of each.

    Events are counted and not parsed, so that readers take little from what is measured beside them.
    """
    viewers, ended = [Viewer(link) for link in links], threading.Event()
    seen = [0] * len(viewers)

    def read(number: int) -> None:
        with _stream(viewers[number].origin, viewers[number].cookie) as answer:
            while not ended.is_set() and (line := answer.readline()):
                seen[number] += line.startswith(b"event:")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(viewers))]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)


@contextmanager
def _stream(link: str, cookie: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(link).port or 80, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/api/stream", headers={"cookie": cookie.partition(";")[0]})
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        yield answer
    finally:
        connection.close()


def server_sent(
    link: str, cookie: str, enough: Callable[[list[tuple[str, str, Any]]], bool]
) -> list[tuple[str, str, Any]]:
    """`(id, event, data)` of the stream itself, until there is enough."""
    found: list[tuple[str, str, Any]] = []
    fields: dict[str, str] = {}
    with _stream(link, cookie) as answer:
        while not enough(found):
            line = answer.readline().decode().rstrip("\n")
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                found.append((fields["id"], fields["event"], json.loads(fields["data"])))
                fields = {}
    return found


def patched(target: Any, patch: Any) -> Any:
    """RFC 7386 applied, as the page does it."""
    if not isinstance(patch, dict):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = patched(found.get(key), value)
    return found
