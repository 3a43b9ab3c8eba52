"""How many requests a graph takes in before it refuses, and how long one may take: the defaults of the components and
of the twin.

With them an overloaded graph queues: a request waits until its deadline, as with `vllm serve`, and is not refused.
"""

from __future__ import annotations

from typing import Final

MAX_INFLIGHT: Final = 8192
"""Requests that a Frontend serves at once, those that wait included. Two descriptors each."""

MAX_NUM_WAITING: Final = 8192
"""Requests that wait for one worker's engine."""

REQUEST_TIMEOUT_S: Final = 600.0
"""From a request's first byte to its answer's last: the default of OpenAI's clients, too."""
