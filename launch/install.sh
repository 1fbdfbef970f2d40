#!/usr/bin/env bash
# Makes a virtual environment once and installs megascale_jax into it, editable, in the versions of constraints.txt.
#
#   launch/install.sh ENVIRONMENT [EXTRA]      EXTRA: dev, aot, gpu
#
# An environment whose Python no longer runs, or is too old, is made anew. On success the stamp file
# ENVIRONMENT/.installed (or .installed-EXTRA) is touched; make compares it with pyproject.toml and constraints.txt.
set -euo pipefail

environment=$1
extra=${2:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if ! "$environment/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    python=$("$root/launch/find-python.sh")
    echo "making $environment with $python"
    if ! "$python" -m venv --clear "$environment" >/dev/null; then
        echo "$python could not make $environment; see the lines above, or name another Python: make PYTHON=/path/to/python ..." >&2
        exit 1
    fi
fi
echo "installing megascale_jax${extra:+[$extra]} into $environment (minutes, once)"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$root/constraints.txt" --editable "$root${extra:+[$extra]}"
touch "$environment/.installed${extra:+-$extra}"
