# Sourced by the other scripts: the environment .venv with this checkout and what constraints.txt pins, made when that changes.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
_wanted=$(cat pyproject.toml constraints.txt | sha256sum)
if [ "$(cat .venv/installed 2>/dev/null)" != "$_wanted" ]; then
    echo "installing into .venv (once) ..."
    rm -rf .venv
    ${PYTHON:-python3} -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
    echo "$_wanted" >.venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"
# One thread a process: ranks share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
