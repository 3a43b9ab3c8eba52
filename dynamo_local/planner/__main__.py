"""`python -m dynamo_local.planner`, as Dynamo's planner is started.

`--adjustment-interval 10 …`: as `dynamo planner start`, in the arbiter of the running graph. Without one: an error.
`--environment kubernetes --config …`: by itself, in a pod, for a graph that Dynamo's operator runs.
"""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    # Imported by name: the command line imports this package, and an import back would be a circle.
    planner_command = import_module("dynamo_local.kubernetes.planner_command")
    main = import_module("dynamo_local.cli.main")
    if planner_command.is_meant(sys.argv[1:]):
        main.run(planner_command.in_cluster)
    else:
        sys.argv[1:1] = ["planner", "start"]
        main.main()
