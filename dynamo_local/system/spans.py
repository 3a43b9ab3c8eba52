"""The steps of a request's way as values: a span, and stages that nobody records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["server", "internal"]

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The standard variables that say where traces go; the first counts more."""


class Span(Protocol):
    """One step of a request's way. It never holds text of a prompt or of an answer."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        ...

    def event(self, name: str, attributes: Attributes) -> None:
        """Something happened now."""
        ...

    def failed(self, error_type: str) -> None:
        """The step has failed. The log has the error's words, which may quote the request."""
        ...


class _NoSpan:
    """A step that nobody records."""

    def set(self, attributes: Attributes) -> None:
        pass

    def event(self, name: str, attributes: Attributes) -> None:
        pass

    def failed(self, error_type: str) -> None:
        pass


class Stages:
    """Consecutive steps within the running task's span; here nobody records them."""

    def begin(self, name: str) -> None:
        """The step before has ended, and this one begins."""

    def end(self) -> None:
        """The last one has ended. Again: nothing."""


NO_SPAN: Final[Span] = _NoSpan()
NO_STAGES: Final = Stages()
