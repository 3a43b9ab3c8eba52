#!/bin/bash
# Dynamo 1.x's own frontend and mocker, into a virtual environment that exists: install.sh VENV
#
# Without its dependencies: one of them is a stub in the registry. These here are what the two need.
# Exit code 3: the wheels cannot be had here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1/bin/python
pip=("$python" -m pip install -q)
if ! "${pip[@]}" --no-deps -r "$here/wheels.txt"; then
    echo "the wheels of ai-dynamo ($(tr '\n' ' ' <"$here/wheels.txt")) cannot be had here" >&2
    exit 3
fi
"${pip[@]}" -r "$here/requirements.txt"
"$python" -c 'import dynamo.frontend, dynamo.mocker'
