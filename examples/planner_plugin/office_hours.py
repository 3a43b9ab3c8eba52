"""A planner's plugin: in office hours there are never fewer than so many decode workers.

    python office_hours.py --listen unix:///tmp/office-hours.sock --gateway unix:///…/plugins.sock

It registers itself at the planner's gateway, and leaves when it is ended. See docs/plugins.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from datetime import datetime

from dynamo_local.planner.stages import PipelineContext, PluginSpec, Stage
from dynamo_local.planner.values import ComponentTarget, Override, OverrideType


class OfficeHours:
    """At least `workers` decode workers from `first` to `last` o'clock; at other times no opinion."""

    plugin = PluginSpec("office-hours", Stage.PROPOSE, priority=5, version="1.0", needs=("observations.workers",))

    def __init__(self, workers: int = 2, first: int = 8, last: int = 18) -> None:
        self.workers, self.first, self.last = workers, first, last

    def propose(self, context: PipelineContext) -> Override | None:
        """Called in each tick."""
        if not self.first <= datetime.now().astimezone().hour < self.last:
            return None
        floor = ComponentTarget("decode", self.workers, OverrideType.AT_LEAST)
        return Override((floor,), reason=f"office hours: {self.first} to {self.last}")


async def main() -> None:
    """Serve it until SIGTERM or Ctrl-C."""
    from dynamo_local.planner.plugins.serving import serve

    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--listen", required=True, help="unix:///PATH or HOST:PORT, where the planner calls it")
    words.add_argument(
        "--gateway", help="where the planner lets plugins register; else its configuration names this one"
    )
    words.add_argument("--workers", type=int, default=2)
    words.add_argument("--first", type=int, default=8)
    words.add_argument("--last", type=int, default=18)
    given = words.parse_args()
    plugin = OfficeHours(given.workers, given.first, given.last)
    serving = asyncio.ensure_future(
        serve(
            plugin,
            plugin.plugin,
            listen=given.listen,
            gateway=given.gateway,
            token=os.environ.get("PLUGIN_TOKEN", ""),  # never on the command line: everybody on the host can read that
            ready=lambda endpoint: print(f"ready {endpoint}", flush=True),
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


if __name__ == "__main__":
    asyncio.run(main())
