#!/usr/bin/env bash
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=slurm-%j.out
# A Ray cluster for one run under Slurm: the head on the first host, a worker on each other one, and the series as a
# submitted job. Slurm has to be one that you know; this file was only run with --dry-run (environment/clusters.md).
[ -n "${BASH_VERSION:-}" ] || { echo "Run it with bash or sbatch" >&2; exit 2; }
set -uo pipefail

usage() {
    cat <<'TEXT'
sbatch [options of sbatch] environment/clusters/slurm.sh [--profile NAME] [options of the series]
bash environment/clusters/slurm.sh --dry-run [--nodes N] [--profile NAME] [options of the series]

Run it in the project's folder, which has to be the same on all hosts (a shared file system), with results in runs/ or
where --runs says. Hosts, cards and time are sbatch's options; those at the top of this file are for profile cluster.

  --profile NAME    as in environment/run.sh (default cluster)
  --dry-run         print what would run on which host, and start nothing
  --nodes N         of a dry run outside of Slurm (default: what this file asks for)

The output file has the run's progress; the executed notebooks and metrics.json lie in runs/<profile>/. scancel, and the
end of the time, stop the run first and then Ray. The cluster's token is made here and goes to the hosts in the
environment that srun hands on: it is in no file.
TEXT
}

# srun's options of a step that is one Ray node; Slurm 22.05 and newer do not take --cpus-per-task over from sbatch
step=(srun --input=none --kill-on-bad-exit --export=ALL ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"})
profile=cluster dry_run="" nodes="" series=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --dry-run) dry_run=yes ;;
        --profile=*) profile=${1#--profile=} ;;
        --profile | --nodes)
            [ -n "${2:-}" ] && [ "${2#-}" = "$2" ] || { echo "slurm.sh: $1 needs a value" >&2; exit 2; }
            [ "$1" = --nodes ] && nodes=$2 || profile=$2
            shift ;;
        *) series+=("$1") ;;
    esac
    shift
done

# Slurm runs a copy of this file from its own folder, so the project is where sbatch was called
if [ -n "${SLURM_JOB_ID:-}" ]; then
    ROOT=${SLURM_SUBMIT_DIR:-$PWD}
else
    ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
    [ -n "$dry_run" ] || { echo "slurm.sh: this is no Slurm job; start it with sbatch, or look with --dry-run" >&2; exit 2; }
fi
NODE=$ROOT/environment/clusters/node.sh
[ -f "$NODE" ] || { echo "slurm.sh: $ROOT is not the project's folder: call sbatch there" >&2; exit 2; }

hosts=()
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
else
    nodes=${nodes:-$(sed -n 's/^#SBATCH --nodes=//p' "${BASH_SOURCE[0]}")}
    for number in $(seq "$nodes"); do hosts+=("host$number"); done
fi
[ ${#hosts[@]} -gt 0 ] || { echo "slurm.sh: scontrol names no hosts for '${SLURM_JOB_NODELIST:-}'" >&2; exit 1; }
head=${hosts[0]} workers=$((${#hosts[@]} - 1))
# ports of this job: another one may share a host. Outside of the range that Ray's workers take (10002 to 19999)
number=$((${SLURM_JOB_ID:-0} % 5000)) job=slurm-${SLURM_JOB_ID:-0}
port=$((20000 + number)) dashboard_port=$((25000 + number))
dashboard=http://127.0.0.1:$dashboard_port

setup=(bash "$ROOT/environment/run.sh" --profile "$profile" --set-up-only)
start_head=("${step[@]}" --nodes=1 --ntasks=1 --nodelist="$head"
    bash "$NODE" head --profile "$profile" --port "$port" --dashboard-port "$dashboard_port")
start_workers=("${step[@]}" --nodes="$workers" --ntasks="$workers" --exclude="$head"
    bash "$NODE" worker --profile "$profile" --head "$head:$port" --wait 600)
wait_for_all=(python -m helpers.nodes wait --dashboard "$dashboard" --nodes "${#hosts[@]}" --seconds 900)
submit=(python -W ignore -m ray.scripts.scripts job submit --address "$dashboard" --submission-id "$job"
    -- bash "$ROOT/environment/run.sh" --profile "$profile" ${series[@]+"${series[@]}"})

if [ -n "$dry_run" ]; then
    printf '# on %s, the host of the batch script\n' "$head"
    printf '%s\n' "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=<made for this job>" "${setup[*]@Q}" "${start_head[*]@Q} &"
    [ $workers -eq 0 ] || printf '# on %s\n%s\n' "${hosts[*]:1}" "${start_workers[*]@Q} &"
    printf '# on %s\n' "$head"
    printf '%s\n' "${wait_for_all[*]@Q}" "${submit[*]@Q}"
    exit 0
fi

cd "$ROOT" || exit 1
RAY_AUTH_TOKEN=$(od -An -N 32 -t x1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
steps=()
end() { # stop the run, then Ray; also when Slurm announces the end of the time
    trap "" TERM INT
    [ -z "${following:-}" ] || timeout 60 python -W ignore -m ray.scripts.scripts job stop --address "$dashboard" "$job"
    for pid in ${following:-} ${steps[@]+"${steps[@]}"}; do kill "$pid" 2>/dev/null; done
    wait
    exit "$1"
}
trap 'end 143' TERM INT
"${setup[@]}" || exit 1
. "$ROOT/environment/setup.sh"
choose_environment --profile "$profile"
set_up # only puts the environment on PATH: it is there
"${start_head[@]}" &
steps+=($!)
if [ $workers -gt 0 ]; then
    "${start_workers[@]}" &
    steps+=($!)
fi
"${wait_for_all[@]}" || end 1
"${submit[@]}" & # in the background: bash runs a trap only between commands
following=$!
wait "$following"
code=$?
following=
end "$code"
