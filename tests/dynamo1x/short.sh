#!/bin/bash
# The short form for CI: one aggregated graph, scaled up and down under load. Usage: short.sh VENV [pytest words]
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
shift
"$here/install.sh" "$venv"
code=$?
if [ $code -eq 3 ]; then
    echo "dynamo1x: not run: the wheels of ai-dynamo cannot be had here"
    exit 0
fi
[ $code -eq 0 ] || exit $code
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider --reruns 1 -rs -m short "$here" "$@"
