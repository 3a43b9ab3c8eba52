"""Who a plugin is, by the token that it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from dynamo_local.config.planner.plugins import AuthConfig
from dynamo_local.core.api_keys import parse_source
from dynamo_local.system.key_files import ApiKeys

UNAUTHENTICATED = "unauthenticated"
OPTION = "Planner.plugin-registration.auth.static-secrets"


class Tokens:
    """The secrets of now; a file that changes is read again while `follow` runs."""

    def __init__(self, sources: Sequence[str], secrets: Sequence[tuple[ApiKeys, str]]) -> None:
        self._sources = tuple(sources)
        self._secrets = tuple(secrets)

    @classmethod
    def load(cls, auth: AuthConfig, environ: Mapping[str, str]) -> Tokens:
        """Read them. Blocks. Raises `ConfigError`, which names the source and shows no secret."""
        secrets = [
            (ApiKeys.load(parse_source(source), environ, option=OPTION), subject)
            for source, subject in auth.static_secrets.items()
        ]
        return cls(auth.trusted_sources, secrets)

    def subject_of(self, token: str) -> str | None:
        """In whose name the token speaks; None for nobody's. Where no source is trusted, everybody's is the same."""
        if not self._sources:
            return UNAUTHENTICATED
        shown = token.encode()
        for source in self._sources:
            if source == "allow_unauthenticated":
                return UNAUTHENTICATED
            for keys, subject in self._secrets:
                if keys.accepts(shown):
                    return subject
        return None

    async def follow(self) -> None:
        """Read changed files again, until it is cancelled."""
        await asyncio.gather(*(keys.follow() for keys, _ in self._secrets))
