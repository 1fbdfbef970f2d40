#!/usr/bin/env bash
# Prints the path of a Python that can install and run megascale_jax, or one line with the remedy on stderr and exits 1.
#
#   launch/find-python.sh [MINOR]      any Python from 3.12 to 3.14, or exactly 3.MINOR
#
# 3.14 is the newest for which every locked dependency has a wheel. Candidates are run, not only looked up: a shim on PATH may point at nothing, and a distribution's Python may lack venv.
# In order: $PYTHON, python3, python3.13, python3.12, python3.14, pyenv's versions, and one that uv fetches
# (not with MEGASCALE_FETCH=no).
set -euo pipefail

wanted=${1:-}
version_text=${wanted:+3.$wanted}
version_text=${version_text:-from 3.12 to 3.14}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=${MEGASCALE_CACHE:-$root/.cache}/uv
remedy="install one (Debian or Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12 ..."

# What a candidate must be able to do; prints its real path, or says on stderr what it lacks.
probe='
import sys
wanted = sys.argv[1]
if not (3, 12) <= sys.version_info[:2] <= (3, 14) or (wanted and sys.version_info[:2] != (3, int(wanted))):
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
print(sys.executable)
'
without_venv=

# Succeeds and prints the path if $1 is such a Python.
try_python() {
    local found status=0
    found=$("$1" -I -c "$probe" "$wanted" </dev/null 2>/dev/null) || status=$?
    if [[ $status -eq 4 ]]; then without_venv=$1; fi
    if [[ $status -ne 0 || -z $found ]]; then return 1; fi
    printf '%s\n' "$found"
    exit 0
}

# A Python that uv already has or downloads; uv itself may come from PyPI into a scratch environment.
try_uv() {
    local uv base version=${wanted:+3.$wanted}
    version=${version:-3.12}
    uv=$(command -v uv || true)
    if [[ -z $uv && ! -x $scratch/bin/uv ]]; then
        for base in python3 python; do
            if "$base" -m venv "$scratch" </dev/null >/dev/null 2>&1; then
                echo "no Python $version here; asking uv for one" >&2
                "$scratch/bin/python" -m pip install --quiet uv </dev/null >/dev/null 2>&1 || true
                break
            fi
        done
    fi
    uv=${uv:-$scratch/bin/uv}
    [[ -x $uv ]] || return 1
    "$uv" python install --quiet "$version" </dev/null >/dev/null 2>&1 || true
    "$uv" python find --no-project "$version" </dev/null 2>/dev/null
}

if [[ -n ${PYTHON:-} ]]; then
    try_python "$PYTHON" || true
    if [[ -z $wanted ]]; then
        lacks="is no Python $version_text"
        if [[ -n $without_venv ]]; then lacks="has no venv or ensurepip module"; fi
        echo "PYTHON=$PYTHON $lacks; name another one, or unset PYTHON to search" >&2
        exit 1
    fi
fi
for candidate in python3 python3.13 python3.12 python3.14; do
    try_python "$candidate" || true
done
for candidate in "${PYENV_ROOT:-${HOME:-/root}/.pyenv}"/versions/3.{13,12,14}*/bin/python; do
    if [[ -x $candidate ]]; then try_python "$candidate" || true; fi
done
if [[ ${MEGASCALE_FETCH:-yes} != no ]] && candidate=$(try_uv); then
    try_python "$candidate" || true
fi

if [[ -n $without_venv ]]; then
    echo "$without_venv has no venv or ensurepip module; Debian or Ubuntu: apt install python3-venv, or make PYTHON=/path/to/python ..." >&2
else
    echo "no Python $version_text found, and uv could not fetch one; $remedy" >&2
fi
exit 1
