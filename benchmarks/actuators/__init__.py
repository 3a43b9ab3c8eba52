"""Each way to one more worker, from the command to its first token in the new role, beside a cold start.

On the simulated engine, and on vLLM's CPU build where it is installed. The ways are those of `ways.WAYS`; in one run,
in turn, so that all see the same machine.
"""

from __future__ import annotations

from benchmarks.actuators.rounds import run

__all__ = ["run"]
