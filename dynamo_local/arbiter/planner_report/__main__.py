"""The process that writes one report: `python -m dynamo_local.arbiter.planner_report LOG FOLDER SINCE NAMESPACE`.

It gives way to all who serve. What goes wrong stands on its standard error, in one line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dynamo_local.arbiter.planner_report.writing import title_of, write_next
from dynamo_local.errors import DynamoError
from dynamo_local.system.prctl import die_as_asked

NICE = 10


def main() -> None:
    """See the module."""
    die_as_asked(os.environ)
    os.nice(NICE)
    log, folder, since, namespace = sys.argv[1:]
    try:
        write_next(Path(log), Path(folder), since_s=float(since), title=title_of(namespace))
    except DynamoError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
