#!/usr/bin/env bash
# Starts Ray on this host, as the head of a cluster or as a worker of one, until it is told to end.
[ -n "${BASH_VERSION:-}" ] || { echo "Run it with bash: bash environment/clusters/node.sh" >&2; exit 2; }
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

usage() {
    cat <<'TEXT'
bash environment/clusters/node.sh head   [options] [-- options of ray start]
bash environment/clusters/node.sh worker --head HOST:PORT [options] [-- options of ray start]

Sets the environment of a profile up if it is not there, and starts Ray on this host. Stays until it gets a SIGTERM or
Ctrl-C, and then ends all of Ray's processes here. Start the head first; a worker waits for it.

  --profile NAME          as in environment/run.sh (default cpu)
  --address IP            this host's address, as the other nodes reach it (default: Ray's choice, the one of the
                          default route). Name it where a host has several networks
  --head HOST:PORT        worker: where the head is
  --port N                head: port of the cluster (default 6379)
  --dashboard-port N      head: port of the dashboard and of ray job submit (default 8265), on this host only
  --dashboard-host IP     head: let other hosts reach the dashboard at this address
  --temp-dir DIR          Ray's folder, with the logs, which then stays. A short path: sockets lie below it, and
                          theirs may have 107 characters. Default: a new one in /tmp that goes with Ray
  --wait SECONDS          worker: how long to wait for the head (default 300)
  --python PATH           this Python has everything installed (environment/bundle.py): set nothing up
  --dry-run               print what would run, and start nothing

The token that every connection needs comes from RAY_AUTH_TOKEN, or from the file that RAY_AUTH_TOKEN_PATH names, and is
the same on all nodes. Ray does not encrypt: use a network that only you are in.
TEXT
}

refuse() { printf 'node.sh: %s\n' "$*" >&2; exit 2; }

# value OPTION VALUE: the value of an option that needs one.
value() { [ -n "${2:-}" ] && [ "${2#-}" = "$2" ] || refuse "$1 needs a value; --help names the options"; printf '%s' "$2"; }

role=${1:-}
case $role in
    head | worker) shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac
profile=cpu address="" head="" port=6379 dashboard_port=8265 dashboard_host=127.0.0.1 temp="" wait_seconds=300
python="" dry_run=""
while [ $# -gt 0 ]; do
    case $1 in
        --profile) profile=$(value "$1" "${2:-}") || exit 2; shift ;;
        --address) address=$(value "$1" "${2:-}") || exit 2; shift ;;
        --head) head=$(value "$1" "${2:-}") || exit 2; shift ;;
        --port) port=$(value "$1" "${2:-}") || exit 2; shift ;;
        --dashboard-port) dashboard_port=$(value "$1" "${2:-}") || exit 2; shift ;;
        --dashboard-host) dashboard_host=$(value "$1" "${2:-}") || exit 2; shift ;;
        --temp-dir) temp=$(value "$1" "${2:-}") || exit 2; shift ;;
        --wait) wait_seconds=$(value "$1" "${2:-}") || exit 2; shift ;;
        --python) python=$(value "$1" "${2:-}") || exit 2; shift ;;
        --dry-run) dry_run=yes ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) refuse "unknown option $1; --help names the options" ;;
    esac
    shift
done
[ "$role" = head ] || [[ $head =~ ^[^:]+:[0-9]+$ ]] || refuse "a worker needs --head HOST:PORT"
for number in "$port" "$dashboard_port" "$wait_seconds"; do
    [[ $number =~ ^[0-9]+$ ]] || refuse "'$number' is no number"
done
[ ${#temp} -le 40 ] || refuse "--temp-dir $temp is longer than 40 characters: the sockets below it would not fit"
[ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || refuse "there is no token. Make one, and give every node the same:
  export RAY_AUTH_TOKEN=\$(python3 -c 'import secrets; print(secrets.token_hex(32))')"

# ray_start FOLDER: the command's words, into the array `command`.
ray_start() {
    command=("$named" -W ignore -m ray.scripts.scripts start --block "--temp-dir=$1")
    [ -z "$address" ] || command+=("--node-ip-address=$address")
    if [ "$role" = head ]; then
        command+=(--head "--port=$port" --include-dashboard=true "--dashboard-host=$dashboard_host"
            "--dashboard-port=$dashboard_port")
    else
        command+=("--address=$head")
    fi
    [ "$PROFILE" != cpu ] || command+=(--num-gpus=0)
    command+=(${extra[@]+"${extra[@]}"})
}

# The environment that Ray's processes get; from the profile, in one place (helpers/nodes.py).
node_environment() { PYTHONPATH=$1 "$python" -m helpers.nodes environment --profile "$PROFILE"; }

wait_for_head() {
    local until=$((SECONDS + wait_seconds))
    until (: <"/dev/tcp/${head%:*}/${head##*:}") 2>/dev/null; do
        [ $SECONDS -lt $until ] || fail "no Ray head answers at $head within $wait_seconds s." \
            "the head did not start, or a firewall is between the nodes." "look at the head's output; then start the worker again"
        sleep 1
    done
}

extra=("$@")
choose_environment --profile "$profile"
named=${python:-python}
if [ -n "$python" ]; then
    :
elif [ -z "$dry_run" ] || ready; then
    set_up
    python=python
else # a dry run installs nothing
    find_python
    python=$PYTHON
fi
path=$ROOT${PYTHONPATH:+:$PYTHONPATH}
settings=$(node_environment "$path") || exit 1
if [ -n "$dry_run" ]; then
    ray_start "${temp:-/tmp/ray-NEW}"
    printf '%s\n' "$settings" "export RAY_AUTH_MODE=token"
    [ "$role" = head ] || printf '# waits up to %s s for %s\n' "$wait_seconds" "$head"
    printf '%s\n' "${command[*]@Q}"
    exit 0
fi
eval "$settings"
export RAY_AUTH_MODE=token PYTHONPATH=$path
cd "$ROOT" || exit 1
[ "$role" = head ] || wait_for_head
remove=()
if [ -z "$temp" ]; then
    temp=$(mktemp -d /tmp/ray-XXXXXX) || exit 1
    remove=(--remove "$temp")
fi
ray_start "$temp"
# the launcher ends all that Ray started when its end of this pipe closes: also when this script is killed
# shellcheck disable=SC2034  # the trap closes it
exec {lifeline}> >(exec "$python" -S helpers/launcher.py ${remove[@]+"${remove[@]}"} "${command[@]}")
launcher=$!
trap 'exec {lifeline}>&-; trap "" INT TERM HUP; wait "$launcher"; exit 143' INT TERM HUP
wait "$launcher"
