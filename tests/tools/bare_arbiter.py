"""An arbiter without a graph, until its stdin closes: `python -m tests.tools.bare_arbiter FOLDER`.

Says `ready` when its control endpoint answers.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.drivers.circus_arbiter import Harness


async def main(folder: Path) -> None:
    harness = Harness(folder)
    await harness.arbiter.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await harness.arbiter.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
