#!/usr/bin/env bash
# Kills 100 small runs at random points of random layouts and compares them, resumed, with undisturbed ones: bash scripts/soak.sh [--kills N] [--seed N]
set -euo pipefail
source "$(dirname "$0")/env.sh"
exec python -m tests.faults.soak "$@"
