"""Ports for a command: leased host-wide before it starts, for as long as its runner lives. Light."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping, Sequence

from dynamo_local.errors import ConfigError
from dynamo_local.system.host_leases import is_free, lease

PORTS = range(28_000, 32_000)
"""Below 32768, where the kernel takes ports for outgoing connections: a port that is free now stays free. vLLM's
engines of our own have those below (`engines.vllm.engine_resources`)."""


class Ports:
    """The ports of one command, by name. Held until `close`, or until the process ends."""

    def __init__(self, watcher: str, names: Sequence[str], fixed: Mapping[str, int]) -> None:
        """A fixed port of 0 means any port. Raises `ConfigError` where a fixed one is in use, or none is left."""
        self._leases: list[socket.socket] = []
        self.numbers: dict[str, int] = {}
        first = zlib.crc32(watcher.encode())
        try:
            for name in names:
                self.numbers[name] = self._fixed(name, fixed[name]) if fixed.get(name) else self._free(first)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all of them back."""
        for held in self._leases:
            held.close()
        self._leases.clear()

    def _fixed(self, name: str, port: int) -> int:
        held = lease(f"ports/{port}")
        if held is None:
            raise ConfigError(f"port {port} ({name}) is leased to another worker of this host; choose another")
        self._leases.append(held)
        if not is_free(port):
            raise ConfigError(f"port {port} ({name}) is in use by another program; choose another, or leave it out")
        return port

    def _free(self, first: int) -> int:
        """A free port. Each worker starts its search at another place."""
        for n in range(len(PORTS)):
            port = PORTS.start + (first + n) % len(PORTS)
            held = lease(f"ports/{port}")
            if held is None:
                continue
            if is_free(port):
                self._leases.append(held)
                return port
            held.close()
        raise ConfigError(f"no port between {PORTS.start} and {PORTS.stop} is free on this host")
