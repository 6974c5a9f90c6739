#!/usr/bin/env bash
# Makes the lock files from the *.in files: every package, every version, every file's hash.
#
#   bash environment/lock.sh              keeps the versions of the present locks where they still fit
#   bash environment/lock.sh --upgrade    takes the newest versions that fit (further arguments go to uv)
#
# Needs uv: the one in .venv, or UV=/path/to/uv, or uv on PATH. Uses whatever package index pip or uv is configured
# with; the locks name no index and no host. Test afterwards: bash environment/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

uv=${UV:-../.venv/bin/uv}
[ -x "$uv" ] || uv=$(command -v uv) || {
    echo "lock.sh needs uv. Set the project up first: bash environment/run.sh --set-up-only" >&2
    exit 1
}

# compile NAME ARGUMENTS...: NAME.in -> NAME.lock
compile() {
    local name=$1
    shift
    "$uv" pip compile "$name.in" --quiet --python-version 3.12 \
        --python-platform x86_64-manylinux_2_34 --generate-hashes --annotation-style line --no-header \
        --no-emit-index-url --no-emit-find-links --output-file "$name.lock" "$@"
}

# head NAME SOURCES: puts the explanation on top of NAME.lock
head_comment() {
    local name=$1 sources=$2 text
    text=$(cat "$name.lock")
    {
        echo "# Made by environment/lock.sh from $sources. Do not edit: change the inputs and run it again."
        echo "# Python 3.12, Linux x86-64, glibc 2.34 or newer."
        printf '%s\n' "$text" | grep -v '^# \(Made by\|Python 3\)'
    } >"$name.lock.new"
    mv "$name.lock.new" "$name.lock"
}

# Cuts one package's block out of gpu.lock into gpu-built.lock: it is compiled after the wheels are there.
split_built() {
    local package=transformer-engine-torch
    awk -v name="$package==" 'index($0, name) == 1 {on = 1} on && /^[a-z]/ && index($0, name) != 1 {on = 0} on' \
        gpu.lock >gpu-built.lock
    awk -v name="$package==" '/^[a-z]/ {on = index($0, name) == 1} !on' gpu.lock >gpu.lock.new
    mv gpu.lock.new gpu.lock
}

compile bootstrap "$@"
head_comment bootstrap bootstrap.in
compile cpu --excludes cpu.excludes "$@"
head_comment cpu "cpu.in and cpu.excludes"
compile gpu --excludes gpu.excludes --overrides gpu.overrides "$@"
split_built
head_comment gpu "gpu.in, gpu.overrides and gpu.excludes"
head_comment gpu-built "gpu.in: compiled from source against torch (see Dockerfile)"
compile site "$@"
head_comment site site.in
wc -l bootstrap.lock cpu.lock gpu.lock gpu-built.lock site.lock
