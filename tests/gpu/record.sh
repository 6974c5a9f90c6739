#!/usr/bin/env bash
# Measures what is recorded from a GPU, part by part, each with a time limit.
#
#   bash tests/gpu/record.sh OUT [PART ...]
#
# Parts: series (profile gpu, all notebooks), big (profile gpu-20b: 00 05 06 07), tests (tests/gpu), footprint, sync,
# throughput. Without parts: all of them (estimated at 40 minutes on one H200 with warm kernel caches; limits are below).
# On a host with two GPUs start it twice, with CUDA_VISIBLE_DEVICES=0 and =1 and different parts and GRPO_RUNS.
# OUT gets a log for each part, and the results: one .tgz of a series' run, CSV and JSON of the others.
# Then: python -m helpers.recorded --profile gpu --runs FOLDER, with the unpacked run.
set -uo pipefail
[ $# -ge 1 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1" && OUT=$(cd "$1" && pwd) || exit 1
shift
[ $# -gt 0 ] || set -- series big tests footprint sync throughput
cd "$(dirname "$0")/../.." || exit 1
RUNS=${GRPO_RUNS:-$PWD/runs}

# limited SECONDS NAME COMMAND...: output goes to OUT/NAME.log
limited() {
    local seconds=$1 name=$2 code
    shift 2
    echo "$name: starting, at most $seconds s"
    timeout -k 10 "$seconds" "$@" >"$OUT/$name.log" 2>&1
    code=$?
    echo "$name: exit $code after $SECONDS s in all"
    return $code
}

# keep PROFILE: the run without weights, as one file
keep() { tar czf "$OUT/$1.tgz" -C "$RUNS/$1" --exclude=checkpoints --exclude=trainer . ; }

failed=0
for part in "$@"; do
    case $part in
        series) limited 900 series python3 -W ignore -m helpers.series run --profile gpu --keep-going -p STEPS 60; code=$?
                keep gpu ;;
        big) limited 1500 big python3 -W ignore -m helpers.series run --profile gpu-20b --only 00 05 06 07 --keep-going \
                 -p STEPS 4 -p SAVE_EVERY 0; code=$?
             keep gpu-20b ;;
        tests) GRPO_GPU_RESULTS=$OUT/gpu_tests.json limited 600 tests python3 -W ignore -m pytest tests/gpu -q; code=$? ;;
        footprint) limited 600 footprint python3 -W ignore tests/gpu/footprint.py --out "$OUT/footprint" --layers 4; code=$? ;;
        sync) limited 500 sync python3 -W ignore tests/gpu/sync_ways.py --out "$OUT/sync" --layers 4; code=$?
              rm -rf "$OUT/sync/exported" ;;
        throughput) limited 600 throughput python3 -W ignore tests/gpu/throughput.py --out "$OUT/throughput"; code=$? ;;
        *) echo "no part $part" >&2; exit 2 ;;
    esac
    [ "$code" -eq 0 ] || failed=1
done
exit $failed
