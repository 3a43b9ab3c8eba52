"""Components that run in the processes of another one's workers."""

from __future__ import annotations


def runs_within(guest: str, host: str) -> str:
    """Why nothing can be asked of the guest's workers, and what to do instead."""
    return (
        f"{guest} runs in {host}'s processes and has no workers of its own: say {host}; or give it some by "
        f"{host}.ServiceArgs.colocate: [] in the configuration, which is chosen when the graph is started"
    )
