"""`python -m dynamo_local.planner`, as Dynamo's planner is started.

`--adjustment-interval 10 …`: as `dynamo planner start`, inside of the running graph's arbiter; a graph that does not
run is an error. `--environment kubernetes --config …`: by itself, in a pod, for a graph that Dynamo's operator runs.
"""

from __future__ import annotations

import sys

from dynamo_local.cli.main import main, run
from dynamo_local.kubernetes import planner_command as planner_in_cluster

if __name__ == "__main__":
    if planner_in_cluster.is_meant(sys.argv[1:]):
        run(planner_in_cluster.in_cluster)
    else:
        sys.argv[1:1] = ["planner", "start"]
        main()
