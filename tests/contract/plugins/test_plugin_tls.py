"""Plugins on ports with TLS: gateway and calls by one set of certificates; nobody without them gets a word in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo_local.config.planner_section import planner_section
from dynamo_local.errors import ConfigError
from dynamo_local.planner.plugins.serving import serve
from dynamo_local.planner.stages import PluginSpec, Stage
from dynamo_local.planner.values import ComponentTarget, Override
from dynamo_local.transport import certificates
from dynamo_local.transport.access import PLUGIN_TLS, Tls
from dynamo_local.transport.certificates import Certificates
from tests.drivers.plugin_processes import PlannerSide, planner_side

ON_A_PORT = {"gateway": {"enabled": True, "listen": "127.0.0.1:0", "tls": True}}
SECRET = {"auth": {"trusted_sources": ["static_secret"], "static_secrets": {"env:THE_TOKEN": "me"}}}
DEADLINE_S = 20.0


class Seven:
    """Wants seven decode workers."""

    def propose(self, context: object) -> Override:
        return Override((ComponentTarget("decode", 7),))


def environ(made: Certificates) -> dict[str, str]:
    paths = (made.authority, made.certificate, made.key)
    return {"THE_TOKEN": "a-long-token", **{name: str(path) for name, path in zip(PLUGIN_TLS, paths, strict=True)}}


def tls_of(made: Certificates) -> Tls:
    return Tls.of(environ(made), PLUGIN_TLS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make(tmp_path_factory.mktemp("ours") / "tls")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make(tmp_path_factory.mktemp("others") / "tls")


async def taken(side: PlannerSide, tls: Tls | None, gateway: str | None = None) -> bool:
    """Whether a plugin with these certificates comes in, and is then called, within a few seconds."""
    ready = asyncio.Event()
    task = asyncio.ensure_future(
        serve(
            Seven(),
            PluginSpec("seven", Stage.PROPOSE),
            listen="127.0.0.1:0",
            gateway=gateway or side.gateway,
            token="a-long-token",
            ready=lambda endpoint: ready.set(),
            tls=tls,
        )
    )
    try:
        async with asyncio.timeout(DEADLINE_S if tls is not None and gateway is None else 3.0):
            await ready.wait()
        return (await side.tick()).get("decode") == 7
    except TimeoutError:
        return False
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_gateway_and_calls_speak_tls(made: Certificates) -> None:
    async with planner_side(ON_A_PORT, SECRET, **environ(made)) as side:
        assert side.gateway.startswith("grpcs://127.0.0.1:")
        assert await taken(side, tls_of(made))


async def test_who_shows_no_certificate_of_ours_does_not_get_in(made: Certificates, others: Certificates) -> None:
    async with planner_side(ON_A_PORT, SECRET, **environ(made)) as side:
        stranger = Tls(tls_of(made).ca, tls_of(others).certificate, tls_of(others).key)
        assert not await taken(side, stranger, side.gateway)
        assert not await taken(side, None, side.gateway.replace("grpcs://", "grpc://"))
        assert side.service.rows() == ()


async def test_without_a_certificate_the_gateway_does_not_open(made: Certificates, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DYN_PLUGIN_TLS_CERT_PATH"):
        async with planner_side(ON_A_PORT, SECRET, THE_TOKEN="a-long-token"):
            pass
    spoilt = tmp_path / "key.pem"
    spoilt.write_text("no key")
    with pytest.raises(ConfigError, match="DYN_PLUGIN_TLS_KEY_PATH"):
        async with planner_side(ON_A_PORT, SECRET, **{**environ(made), PLUGIN_TLS[2]: str(spoilt)}):
            pass


def test_a_port_without_tls_is_refused_unless_it_is_wanted() -> None:
    def section(**gateway: object) -> object:
        scheduling = {"gateway": {"enabled": True, "listen": "0.0.0.0:7777", **gateway}}
        return planner_section("Planner", {"scheduling": scheduling, "plugin_registration": SECRET})

    with pytest.raises(ConfigError, match=r"gateway\.tls"):
        section()
    section(tls=True)
    section(allow_insecure=True)
    with pytest.raises(ConfigError, match="a socket is this user's alone"):
        section(tls=True, listen="unix:///run/p.sock")
