"""`python -m dynamo_local.planner --adjustment-interval 10 …`: `dynamo planner start`, as Dynamo's planner is started.

It starts the planner inside of the running graph's arbiter, and returns; a graph that does not run is an error.
"""

from __future__ import annotations

import sys

from dynamo_local.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["planner", "start"]
    main()
