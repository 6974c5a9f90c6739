#!/usr/bin/env bash
# Sets everything up and runs the whole series of notebooks on this machine.
[ -n "${BASH_VERSION:-}" ] || { echo "Run it with bash: bash environment/run.sh" >&2; exit 2; }
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
bash environment/run.sh [--profile cpu|gpu|gpu-20b|cluster|verl-4394] [--only NN ...] [options of the series]

Sets everything up in .venv (profile cpu) or .venv-gpu (the others), then runs the notebooks with papermill.
The first start installs several GB; later starts find the environment ready.

  --profile NAME    which profile to run (default cpu)
  --only NN ...     only these notebooks, e.g. --only 04 05
  --set-up-only     make the environment and stop
  --help            this text; all options: .venv/bin/python -m helpers.series run --help

Results: runs/<profile>/ (executed notebooks, figures, metrics.json, report.html).
To start over, remove .venv; a set-up that was interrupted is repaired by the next start.

Settings from outside, all optional:
  GPT_OSS_PYTHON    the Python 3.12 to use
  GPT_OSS_TE_WHEEL  a built wheel of TransformerEngine's torch extension (GPU profiles)
  UV_CACHE_DIR      where downloads are kept
  PIP_INDEX_URL, PIP_CERT, PIP_PROXY and pip's configuration files: used as they are, for uv too
TEXT
}

set_up_only=
arguments=()
for argument in "$@"; do
    case $argument in
        -h | --help) usage; exit 0 ;;
        --set-up-only) set_up_only=yes ;;
        *) arguments+=("$argument") ;;
    esac
done
choose_environment ${arguments[@]+"${arguments[@]}"}
set_up
[ -z "$set_up_only" ] || exit 0
cd "$ROOT" || exit 1
exec python -m helpers.series run --profile "$PROFILE" ${arguments[@]+"${arguments[@]}"}
