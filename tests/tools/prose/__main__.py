"""`python -m tests.tools.prose`."""

import sys

from tests.tools.prose.check import main

sys.exit(main())
