"""Dynamo's own reader of profiles from its wheel, as it is: prints the passes that its planner makes of a folder.

Its packages import the whole planner, and that needs a package that is only a stub in the registry. So they are made
here as empty ones with their folders, as in `dynamo_plugin.py`.
"""

from __future__ import annotations

import json
import sys

from dynamo_plugin import empty_packages

PACKAGES = ("dynamo", "dynamo.common", "dynamo.planner", "dynamo.planner.config", "dynamo.planner.monitoring")


def main(folder: str) -> None:
    """`[[prefill tokens, decode requests, KV tokens, seconds]]`, of both files."""
    empty_packages(PACKAGES)
    from dynamo.planner.monitoring import perf_metrics

    passes = perf_metrics._convert_prefill_profiling(folder) + perf_metrics._convert_decode_profiling(folder)
    rows = [
        [
            each.scheduled_requests.sum_prefill_tokens,
            each.scheduled_requests.num_decode_requests,
            each.scheduled_requests.sum_decode_kv_tokens,
            each.wall_time,
        ]
        for each in passes
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
