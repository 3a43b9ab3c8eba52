"""Where the requests of `dynamo simulate` come from: a file, or the generator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dynamo_local.errors import BadInput

if TYPE_CHECKING:
    from dynamo_local.twin.generator import Generated
    from dynamo_local.twin.trace import TraceRequest


class Source(Protocol):
    """Requests by name. `what` says whether they were recorded in a file or made."""

    @property
    def what(self) -> str:
        """ "trace" or "generated"."""
        ...

    @property
    def name(self) -> str:
        """The file's name, or what the generator was given; for the report."""
        ...

    def requests(self, *, limit: int | None, speed: float) -> list[TraceRequest]:
        """The first `limit` of them (None: all), their times divided by `speed`."""
        ...


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    what: str = "trace"

    @property
    def name(self) -> str:
        return self.path.name

    def requests(self, *, limit: int | None, speed: float) -> list[TraceRequest]:
        """As `read_trace` returns them."""
        from dynamo_local.twin.trace import read_trace

        return read_trace(self.path, limit=limit, speed=speed)


@dataclass(frozen=True, slots=True)
class _Made:
    generated: Generated
    write_to: Path | None
    what: str = "generated"

    @property
    def name(self) -> str:
        return str(self.generated)

    def requests(self, *, limit: int | None, speed: float) -> list[TraceRequest]:
        """As generated. The file `write_to` has the first `limit` of them, with times not divided by `speed`."""
        from dynamo_local.twin.generator import generate
        from dynamo_local.twin.trace import write_trace

        made = list(islice(generate(self.generated.options), limit))
        if self.write_to is not None:
            write_trace(self.write_to, made)
        return made if speed == 1.0 else [replace(request, at_s=request.at_s / speed) for request in made]


def source_of(trace: Path | None, generate: str | None, write_to: Path | None) -> Source:
    """What the options ask for. Raises `BadInput` unless there is one of `--trace` and `--generate`."""
    if (trace is None) == (generate is None):
        given = "both are given; keep one" if trace is not None else "neither is given"
        raise BadInput(f"the requests come from --trace FILE or from --generate chat|code|sin, and {given}")
    if trace is not None:
        if write_to is not None:
            raise BadInput(f"--write-trace {write_to} keeps what --generate made; --trace {trace} is a file already")
        return _File(trace)
    from dynamo_local.twin.generator import parse_generated

    return _Made(parse_generated(generate or ""), write_to)
