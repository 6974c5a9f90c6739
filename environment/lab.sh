#!/usr/bin/env bash
# Sets everything up and opens JupyterLab on the notebooks.
[ -n "${BASH_VERSION:-}" ] || { echo "Run it with bash: bash environment/lab.sh" >&2; exit 2; }
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
bash environment/lab.sh [--profile cpu|gpu|gpu-20b|cluster|verl-4394] [options of jupyter lab]

The same set-up as environment/run.sh, then JupyterLab in notebooks/, for this machine only (127.0.0.1), with a
token that is in the address it prints. From another computer: ssh -L 8888:127.0.0.1:8888 THIS-MACHINE
The profile chooses the environment; a notebook's PROFILE parameter chooses what it runs.
TEXT
}

arguments=()
skip=
for argument in "$@"; do
    case $skip$argument in
        -h | --help) usage; exit 0 ;;
        --profile) skip=value: ;;
        --profile=*) ;;
        value:*) skip= ;;
        *) arguments+=("$argument") ;;
    esac
done
choose_environment "$@"
set_up
cd "$ROOT/notebooks" || exit 1
JUPYTER_TOKEN=${JUPYTER_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(24))')}
export JUPYTER_TOKEN # from the environment: an argument could be read by other users in the process list
as_root=()
[ "$(id -u)" -ne 0 ] || as_root=(--allow-root)
exec jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$ROOT/notebooks" ${as_root[@]+"${as_root[@]}"} \
    ${arguments[@]+"${arguments[@]}"}
