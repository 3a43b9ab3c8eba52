#!/usr/bin/env bash
# Debian's Chromium, where it is not installed yet. As a user without root, it says what to do.
set -euo pipefail
command -v "${DYN_CHROMIUM:-/usr/bin/chromium}" >/dev/null && exit 0
if [ "$(id -u)" != 0 ]; then
    echo "Chromium is not installed. Install it: sudo apt-get install chromium fonts-dejavu-core" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
