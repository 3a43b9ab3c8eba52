"""tox's own plugin file: what every environment is told from outside.

The simulation gets seeds that no run has had yet, unless DYN_SIM_FIRST names the first.

uv, which makes the environments, is told what pip was told, since it does not read pip's configuration. A host whose
packages come from a mirror, or from a folder of wheels, has said so to pip (`pip.conf` or `PIP_*`); here it is said
again in uv's words, unless somebody has set those.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping

WORDS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
"""pip's name of a setting -> uv's variable."""
COMMA_SEPARATED = ("UV_FIND_LINKS",)


def pip_settings() -> dict[str, str]:
    """Setting -> value, as pip sees them; of several places that set one, pip's order decides. Empty without pip."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    ordered = [name for where in ("global", "user", "site", ":env:") for name in found if name.startswith(f"{where}.")]
    return {name.rsplit(".", 1)[1]: found[name].strip("'\"") for name in ordered}


def uv_variables(pip: Mapping[str, str]) -> dict[str, str]:
    """The same for uv. Of several indexes the best version wins, as with pip, and not the first index that has one."""
    found = {}
    for name, variable in WORDS.items():
        values = pip.get(name, "").replace("\\n", " ").split()
        if values:
            found[variable] = ("," if variable in COMMA_SEPARATED else " ").join(values)
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return found


os.environ.setdefault("DYN_SIM_FIRST", str(random.SystemRandom().randrange(10**6, 10**9)))
for _name, _value in uv_variables(pip_settings()).items():
    os.environ.setdefault(_name, _value)
