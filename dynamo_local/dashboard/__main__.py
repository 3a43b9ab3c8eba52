"""`python -m dynamo_local.dashboard`: the page's process, as the arbiter starts it."""

import sys

from dynamo_local.dashboard.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
