#!/usr/bin/env bash
# What the browser tests need of Debian (Chromium; with "all" nginx and libfaketime, too), and axe-core from the npm
# registry. Usage: install.sh VENV [all]. Exit code 3: it is not to be had. Without root it says what to install.
set -euo pipefail
venv=$1
missing=()
command -v "${DYN_CHROMIUM:-/usr/bin/chromium}" >/dev/null || missing+=(chromium fonts-dejavu-core)
if [ "${2:-}" = all ]; then
    [ -x /usr/sbin/nginx ] || missing+=(nginx-light)
    compgen -G "/usr/lib/*/faketime/libfaketime.so.1" >/dev/null || missing+=(faketime)
fi
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "Not installed: ${missing[*]}. Install them: sudo apt-get install ${missing[*]}" >&2
        exit 3
    fi
    apt-get update -qq || exit 3
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" || exit 3
fi
"$venv/bin/python" -m tests.tools.vendor --tests "$venv/axe" || exit 3
