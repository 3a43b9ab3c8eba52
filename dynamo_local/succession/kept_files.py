"""The files that a run cannot do without, kept by its guardian: who clears the runtime folder must not end the run.

A live arbiter writes them again itself (`serve.runtime_folder`). With the arbiter gone nobody else knows what was in
them: the certificates and the token with which the running etcd and NATS are reached are written nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from dynamo_local.infra.specs import write_private

log = logging.getLogger(__name__)


class KeptFiles:
    """What is in these files now; one that cannot be read is not kept."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._texts: dict[Path, str] = {}
        for path in paths:
            try:
                self._texts[path] = path.read_text()
            except OSError as error:
                log.warning("%s is not kept: %s", path, error)

    def restore(self) -> list[Path]:
        """Write what is missing again, private to the user; returns what was. Raises `OSError`."""
        missing = {path: text for path, text in self._texts.items() if not path.exists()}
        write_private(missing)
        return list(missing)
