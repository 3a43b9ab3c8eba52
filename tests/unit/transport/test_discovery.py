"""The registry's format and probes of its servers, without a server."""

from __future__ import annotations

import asyncio
import json

import pytest

from dynamo_local.core.types import Instance
from dynamo_local.errors import ConfigError, EtcdUnavailable
from dynamo_local.ports import KeyValue
from dynamo_local.transport.discovery import instance_from_kv, instance_to_value, key_of, make_instance, subject_for
from dynamo_local.transport.etcd import parse_endpoints
from dynamo_local.transport.probes import probe_etcd

LEASE = 0x694D967DA694EA1A


def test_the_seeds_example() -> None:
    instance = make_instance("dynamo", "VllmWorker", "generate", LEASE)
    assert key_of(instance) == "dynamo/components/VllmWorker/generate:694d967da694ea1a"
    assert json.loads(instance_to_value(instance)) == {
        "component": "VllmWorker",
        "endpoint": "generate",
        "namespace": "dynamo",
        "lease_id": 7587886413599009306,
        "transport": {"nats_tcp": instance.subject},
    }
    service, _, rest = instance.subject.partition(".")
    assert service[: len("dynamo_vllmworker_")] == "dynamo_vllmworker_"
    assert len(service) == len("dynamo_vllmworker_3f6fafd3")
    assert rest == "generate-694d967da694ea1a"


def test_a_subject_is_the_same_in_every_process() -> None:
    assert subject_for("dynamo", "VllmWorker", "generate", LEASE) == (
        "dynamo_vllmworker_918ba2f1.generate-694d967da694ea1a"
    )


@pytest.mark.parametrize("endpoint", ["chat/completions", "generate", "a.b", "x y", "all>", "*", "ünïcode"])
def test_a_subject_is_legal_for_nats(endpoint: str) -> None:
    subject = subject_for("my-ns", "My.Component", endpoint, LEASE)
    assert subject.count(".") == 1
    assert not set(subject) & set(" *>\t\r\n")
    assert subject.isascii()
    assert ("/" in subject) == ("/" in endpoint)


def test_names_that_differ_in_case_only_have_different_subjects() -> None:
    assert subject_for("ns", "Worker", "e", 1) != subject_for("ns", "worker", "e", 1)


@pytest.mark.parametrize("endpoint", ["generate", "chat/completions"])
def test_a_value_is_read_back(endpoint: str) -> None:
    instance = make_instance("dynamo", "Processor", endpoint, LEASE)
    assert instance_from_kv(KeyValue(key_of(instance), instance_to_value(instance), LEASE)) == instance


def changed(**changes: object) -> bytes:
    value = json.loads(instance_to_value(make_instance("dynamo", "VllmWorker", "generate", LEASE)))
    return json.dumps(value | changes).encode()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\xff\xfe\x00", "not JSON"),
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (changed(lease_id="7587886413599009306"), "lease_id"),
        (changed(lease_id=True), "lease_id"),
        (changed(lease_id=5), "belongs to the key"),
        (changed(component="Processor"), "belongs to the key"),
        (changed(namespace=None), "namespace"),
        (changed(transport=None), "nats_tcp"),
        (changed(transport={"nats_tcp": 5}), "nats_tcp"),
    ],
)
def test_a_broken_value_says_what_is_wrong(value: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        instance_from_kv(KeyValue("dynamo/components/VllmWorker/generate:694d967da694ea1a", value))


def test_an_instance_is_called_by_its_lease() -> None:
    assert Instance("n", "C", "e", 7, "s").instance_id == 7


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:2379", ("127.0.0.1:2379",)),
        ("http://a:1,http://b:2, c:3", ("a:1", "b:2", "c:3")),
        (["http://localhost"], ("localhost:2379",)),
        ("http://[::1]:2379", ("[::1]:2379",)),
        ("127.0.0.1:5", ("127.0.0.1:5",)),
        ("https://etcd.example", ("etcd.example:2379",)),
    ],
)
def test_endpoints_in_every_usual_form(given: str | list[str], expected: tuple[str, ...]) -> None:
    assert tuple(endpoint.target for endpoint in parse_endpoints(given)) == expected


@pytest.mark.parametrize("given", ["", " , ", "ftp://a:1", "http://user:secret@a:1", "http://a:x", "unix:///x"])
def test_endpoints_that_cannot_be_used_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:2379") as caught:
        parse_endpoints(given)
    assert "secret" not in str(caught.value)


# --- probes
# Tests what a probe says of a server that it could not use.


async def test_a_last_attempt_that_was_cut_short_hides_no_reason() -> None:
    """A server that speaks TLS closes; the attempt that met the deadline only knew that nothing had come yet."""
    seen = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await reader.readuntil(b"\r\n\r\n")
        if seen > 1:
            await reader.read()  # until the prober gives up
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EtcdUnavailable, match=rf"write its address as https://127\.0\.0\.1:{port}"):
            await probe_etcd(f"http://127.0.0.1:{port}", 0.2)
    assert seen > 1
