#!/usr/bin/env bash
# The tests: bash scripts/test.sh [full] [pytest arguments]. `full` runs the slower proofs instead.
set -euo pipefail
source "$(dirname "$0")/env.sh"
marker="not full"
if [ "${1:-}" = full ]; then
    marker=full
    shift
fi
exec python -m pytest -m "$marker" "$@"
