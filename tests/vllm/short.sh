#!/bin/bash
# The short form for CI: one aggregated graph with a drain, one disaggregated. Usage: short.sh VENV [pytest words]
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
shift
"$here/install.sh" "$venv"
code=$?
if [ $code -eq 3 ]; then
    echo "vllm: not run: the CPU build of torch cannot be had here"
    exit 0
fi
[ $code -eq 0 ] || exit $code
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider -rs "$here/test_vllm_cpu.py" -k "TestAggregated or TestDisaggregated" "$@"
