#!/bin/bash
# Debian's Prometheus, unpacked into a folder and not installed: prometheus.sh FOLDER prints the program's path.
# Exit code 3: it cannot be had here.
set -uo pipefail
folder=$1
program=$folder/usr/bin/prometheus
if [ ! -x "$program" ]; then
    mkdir -p "$folder"
    (cd "$folder" && apt-get download -qq prometheus >&2 && dpkg-deb -x prometheus_*.deb . && rm -f prometheus_*.deb) || {
        echo "Debian's package prometheus cannot be had here (apt-get update first?)" >&2
        exit 3
    }
fi
echo "$program"
