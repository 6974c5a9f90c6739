#!/usr/bin/env bash
# Sets everything up and passes the tests.
[ -n "${BASH_VERSION:-}" ] || { echo "Run it with bash: bash environment/test.sh" >&2; exit 2; }
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
bash environment/test.sh [paths] [options of pytest]

The same set-up as environment/run.sh, then pytest on tests/unit, tests/integration, tests/notebooks and (where there is a GPU) tests/gpu.

  bash environment/test.sh                  everything
  bash environment/test.sh tests/unit       the fast ones only: a path replaces the four folders
  bash environment/test.sh -k clip -x       further arguments go to pytest
TEXT
}

case ${1:-} in -h | --help) usage; exit 0 ;; esac
choose_environment # the tests run with profile cpu
set_up
cd "$ROOT" || exit 1
folders=(tests/unit tests/integration tests/notebooks tests/gpu)
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then folders=(); fi
done
exec python -m pytest ${folders[@]+"${folders[@]}"} "$@"
