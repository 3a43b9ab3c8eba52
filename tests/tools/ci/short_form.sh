#!/bin/bash
# The short form, for CI, of an environment whose packages may not be to be had: then it says so, and is no failure.
# Usage: short_form.sh NAME WHAT VENV pytest words…   (installs by tests/NAME/install.sh, whose exit code 3 is "not to be had")
set -uo pipefail
name=$1 what=$2 venv=$3
shift 3
bash "tests/$name/install.sh" "$venv"
code=$?
if [ $code -eq 3 ]; then
    echo "$name: not run: $what cannot be had here"
    exit 0
fi
[ $code -eq 0 ] || exit $code
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider -rs "$@"
