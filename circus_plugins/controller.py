"""circus's control endpoint with our commands, for our own arbiter and beside a stock circusd."""

from __future__ import annotations

import logging
from typing import Any

from circus.controller import Controller

import dynamo_local.circus_plugins.commands  # noqa: F401  registers our commands with circus
from dynamo_local.circus_plugins.stock import install_commands

log = logging.getLogger(__name__)


class _NoSignals:
    """Replaces circus's signal handlers, whose HUP is a reload: it would start a second copy of each GPU worker.

    Our own handlers are on the event loop.
    """

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def stop(self) -> None:
        return None


class WorkerController(Controller):  # type: ignore[misc]
    """The control endpoint with our commands and without circus's signal handlers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install_commands(self.commands)

    def _init_syshandler(self) -> None:
        self.sys_hdl = _NoSignals(self)

    def handle_message(self, raw_msg: list[bytes]) -> None:
        """Also answer messages that are no command: circus raises on an empty message, or JSON that is no object.

        Then its socket's other messages would stay unread until the next one comes (edge-triggered).
        """
        try:
            super().handle_message(raw_msg)
        except Exception as error:
            log.warning("a message that is no command: %r (%s: %s)", raw_msg, type(error).__name__, error)
            self.send_error(None, raw_msg[0], raw_msg[-1], "this is no command")
