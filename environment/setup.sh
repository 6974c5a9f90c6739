# Sourced by run.sh, test.sh and lab.sh: makes the environment of a profile, or finds it ready.
#
#   choose_environment "$@"   reads --profile from the arguments: PROFILE, VENV and LOCK are set
#   set_up                    checks the machine, installs what is missing, puts the environment on PATH
#
# What it makes lies in .venv (profile cpu) or .venv-gpu (the others). Removing that folder undoes everything,
# and the next start makes it anew. The packages come from the index that this machine's pip or uv is
# configured with; every file is checked against the hashes in the lock.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
ENVIRONMENT=$ROOT/environment
PROFILES="cpu gpu gpu-20b cluster verl-4394"
STEP_PID=

say() { printf '%s\n' "$*"; }

# fail WHAT CAUSE NEXT: three lines on stderr, then exit 1.
fail() {
    printf '\nSet-up failed: %s\n  likely cause: %s\n  next:         %s\n' "$1" "$2" "$3" >&2
    [ -n "${LOG:-}" ] && [ -f "$LOG" ] && printf '  full log:     %s\n' "$LOG" >&2
    exit 1
}

# ---- which environment ------------------------------------------------------------------------------------

# profile_of ARGUMENTS...: the value of the last --profile, or cpu.
profile_of() {
    local found=cpu
    while [ $# -gt 0 ]; do
        case $1 in
            --profile) found=${2:-} ;;
            --profile=*) found=${1#--profile=} ;;
        esac
        shift
    done
    printf '%s' "$found"
}

choose_environment() {
    PROFILE=$(profile_of "$@")
    case $PROFILE in
        cpu) VENV=$ROOT/.venv LOCK=$ENVIRONMENT/cpu.lock NEED_LINKED_MB=8000 NEED_COPIED_MB=13000 ;;
        gpu | gpu-20b | cluster | verl-4394)
            VENV=$ROOT/.venv-gpu LOCK=$ENVIRONMENT/gpu.lock NEED_LINKED_MB=14000 NEED_COPIED_MB=24000 ;;
        *) fail "there is no profile '$PROFILE'." "a typing mistake." "choose one of: ${PROFILES// /, }" ;;
    esac
    LOG=$VENV/set-up.log STAMP=$VENV/set-up.stamp OURS=$VENV/made-by-environment-setup
}

# ---- is this machine fit ----------------------------------------------------------------------------------

check_machine() {
    local system machine libc
    system=$(uname -s) machine=$(uname -m)
    [ "$system $machine" = "Linux x86_64" ] ||
        fail "this machine is $system on $machine; the locked packages are built for Linux on x86-64." \
            "SGLang 0.5.17 publishes no wheel for it." \
            "use a Linux x86-64 machine, or a container of one (docker run --platform linux/amd64)"
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc="not glibc"
    at_least_2_34 "$libc" ||
        fail "the C library is '$libc'; the locked packages need glibc 2.34 or newer." \
            "an old distribution (before Ubuntu 22.04, Debian 12 or RHEL 9), or musl (Alpine)." \
            "use a newer distribution, or environment/Dockerfile"
    [ "$PROFILE" = cpu ] || [ -n "${set_up_only:-}" ] || nvidia-smi -L >/dev/null 2>&1 ||
        fail "profile $PROFILE needs an NVIDIA GPU and nvidia-smi finds none on this machine." \
            "a machine without a GPU, or without its driver." \
            "run the same notebooks on the CPU: bash environment/run.sh --profile cpu"
}

at_least_2_34() {
    local version=${1#glibc }
    [ "$version" != "$1" ] && [ "$(printf '2.34\n%s\n' "$version" | sort -V | head -n 1)" = 2.34 ]
}

# free_mb FOLDER: free megabytes (1000 kB) where FOLDER, or its nearest existing parent, lies.
free_mb() {
    local folder=$1
    until [ -d "$folder" ]; do folder=$(dirname "$folder"); done
    df -Pk "$folder" | awk 'NR == 2 {printf "%d", $4 * 1024 / 1000000}'
}

uv_cache() { printf '%s' "${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-$ROOT}/.cache}/uv}"; }

# Can files of uv's cache be linked into the environment, so that they are on the disk once?
cache_links() {
    local cache probe
    cache=$(uv_cache) probe=$ROOT/.venv.link-probe
    mkdir -p "$cache" 2>/dev/null && : 2>/dev/null >"$cache/.link-probe" || return 1
    rm -f "$probe"
    ln "$cache/.link-probe" "$probe" 2>/dev/null
    local linked=$?
    rm -f "$probe" "$cache/.link-probe"
    return $linked
}

check_disk() {
    local need=$NEED_COPIED_MB free
    free=$(free_mb "$ROOT")
    [ "$free" -ge "$NEED_LINKED_MB" ] && cache_links && need=$NEED_LINKED_MB
    [ "$free" -ge "$need" ] && return
    fail "only $free MB are free where the project lies ($ROOT); the environment needs $need MB." \
        "the disk is too full, or a small partition." \
        "free some space (df -h), or copy the project to a larger disk and run it there"
}

# ---- Python 3.12 ------------------------------------------------------------------------------------------

candidate_pythons() {
    [ -n "${GPT_OSS_PYTHON:-}" ] && say "$GPT_OSS_PYTHON"
    type -aP python3.12 python3 python
    ls -d "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/3.12.*/bin/python3.12 2>/dev/null | sort -rV
    command -v uv >/dev/null && uv python find --system 3.12 2>/dev/null
    ls -d "${HOME:-/nonexistent}"/.local/share/uv/python/cpython-3.12*/bin/python3.12 2>/dev/null | sort -rV
}

# find_python: sets PYTHON to the first candidate that really runs (a pyenv shim exists without running).
find_python() {
    local candidate without_venv=
    while IFS= read -r candidate; do
        case $candidate in "$VENV"/*) continue ;; esac
        "$candidate" -I -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 || continue
        if "$candidate" -I -c 'import ensurepip, venv' >/dev/null 2>&1; then
            PYTHON=$candidate
            return
        fi
        without_venv=$candidate
    done < <(candidate_pythons)
    [ -z "$without_venv" ] ||
        fail "$without_venv is Python 3.12 without its venv module." "Debian and Ubuntu package it apart." \
            "apt-get install python3.12-venv"
    fail "no working Python 3.12 was found (looked at PATH, pyenv's versions and uv's)." \
        "this machine has another Python, or none." \
        "install one of: apt-get install python3.12 python3.12-venv | pyenv install 3.12 | uv python install 3.12;
                or set GPT_OSS_PYTHON to a Python 3.12 that lies elsewhere"
}

# ---- what pip is configured with, told to uv (which reads no pip.conf) ------------------------------------

# pip_setting NAME: from PIP_NAME, else from pip's configuration files; empty if unset.
pip_setting() {
    local variable=PIP_${1^^}
    variable=${variable//-/_}
    [ -n "${!variable:-}" ] && printf '%s' "${!variable}" && return
    printf '%s\n' "$PIP_SETTINGS" | sed -n "s/^\(global\|install\)\.$1='\(.*\)'\$/\2/p" | tail -n 1 | sed 's/\\n/ /g'
}

# hand_over UV_NAME VALUE: exports it unless it is empty or already set.
hand_over() {
    if [ -n "$2" ] && [ -z "${!1:-}" ]; then export "$1=$2"; fi
}

tell_uv() {
    PIP_SETTINGS=$("$VENV/bin/python" -m pip config list 2>/dev/null) || PIP_SETTINGS=
    [ -n "${UV_INDEX_URL:-}" ] || hand_over UV_DEFAULT_INDEX "$(pip_setting index-url)"
    hand_over SSL_CERT_FILE "$(pip_setting cert)"
    hand_over HTTPS_PROXY "$(pip_setting proxy)"
    hand_over UV_INSECURE_HOST "$(pip_setting trusted-host)"
    hand_over UV_HTTP_TIMEOUT "$(pip_setting timeout)"
    hand_over UV_HTTP_TIMEOUT 120
    case $(pip_setting no-index) in
        1 | true | True | yes | on)
            hand_over UV_FIND_LINKS "$(pip_setting find-links)"
            UV_NO_INDEX_OPTION=--no-index ;;
        *) UV_NO_INDEX_OPTION= ;;
    esac
}

# ---- steps with progress ----------------------------------------------------------------------------------

# step TEXT COMMAND...: output goes to the log; the screen gets the text, a line every 15 s and the seconds.
step() {
    local text=$1 begin=$SECONDS shown=0 before written=""
    shift
    before=$(free_mb "$ROOT")
    say "  $text ..."
    printf '\n== %s\n' "$text" >>"$LOG"
    "$@" >>"$LOG" 2>&1 </dev/null &
    STEP_PID=$!
    while kill -0 "$STEP_PID" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - begin - shown)) -ge 15 ]; then
            shown=$((SECONDS - begin))
            written=$((before - $(free_mb "$ROOT")))
            say "    $shown s so far, about $((written > 0 ? written : 0)) MB written"
        fi
    done
    wait "$STEP_PID"
    local code=$?
    STEP_PID=
    [ $code -eq 0 ] || explain "$text"
    say "    done in $((SECONDS - begin)) s"
}

# seen PATTERN: does the last step's part of the log hold it?
seen() { awk '/^== /{text = ""} {text = text "\n" $0} END {print text}' "$LOG" | grep -qiE "$1"; }

NO_NETWORK='newconnectionerror|connection (refused|reset)|could not connect|error sending request|failed to fetch'
NO_NETWORK+='|failed to download|name resolution|dns error|timed out|unreachable|max retries|proxyerror|sslerror'
NO_NETWORK+='|certificate|tunnel'

# explain STEP: turns the log of a failed step into one sentence.
explain() {
    local again="run the same command again; what has arrived is kept"
    if seen 'no space left|disk quota'; then
        fail "$1: the disk ran full." "the project's or the download cache's disk ($(uv_cache))." \
            "free some space (df -h), then $again"
    elif seen 'hash mismatch|do not match the hashes|hashes are required'; then
        fail "$1: a downloaded file's hash is not the one in the lock." \
            "a mirror that repacks packages, a damaged download, or tampering." \
            "check which index pip and uv are configured with (pip config list), clear the cache
                ('$VENV/bin/uv' cache clean), then $again"
    elif seen "$NO_NETWORK"; then
        fail "$1: the package index cannot be reached." \
            "no network, a proxy that must be set, or an index that is down." \
            "check the network and what pip is configured with (pip config list; HTTPS_PROXY, PIP_INDEX_URL,
                PIP_CERT), then $again"
    elif seen 'no matching distribution|not found in the (package registry|provided)|no version of'; then
        fail "$1: the package index lacks a locked version." "a mirror that is incomplete or out of date." \
            "use an index that has it (PIP_INDEX_URL), then $again"
    fi
    tail -n 15 "$LOG" >&2
    fail "$1 did not work; the last lines are above." "not one that this script knows." "read the full log, then $again"
}

interrupted() {
    trap - INT TERM HUP
    [ -n "$STEP_PID" ] && kill "$STEP_PID" 2>/dev/null && wait "$STEP_PID" 2>/dev/null
    printf '\nSet-up interrupted. Nothing is lost: the next start repairs it and keeps what was downloaded.\n' >&2
    exit 130
}

# ---- the environment --------------------------------------------------------------------------------------

lock_files() {
    say "$ENVIRONMENT/bootstrap.lock"
    say "$LOCK"
    if [ "$PROFILE" != cpu ]; then say "$ENVIRONMENT/gpu-built.lock"; fi
    say "$ROOT/pyproject.toml"
}

# What the stamp must say: where the project lies, and what was installed.
wanted_stamp() {
    local file
    say "$ROOT"
    lock_files | while IFS= read -r file; do cat "$file"; done | sha256sum
}

ready() {
    [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(wanted_stamp)" ] && "$VENV/bin/python" -I -c '' 2>/dev/null
}

# Keeps a finished environment whose lock changed; makes every other one anew (unfinished, moved, old Python).
make_venv() {
    if [ -e "$VENV" ] && [ ! -f "$OURS" ]; then
        fail "$VENV exists and was not made by this set-up." "you or another tool made it." \
            "move it away: mv '$VENV' '$VENV.mine'"
    fi
    if [ -f "$STAMP" ] && [ "$(head -n 1 "$STAMP")" = "$ROOT" ] && "$VENV/bin/python" -I -c '' 2>/dev/null; then
        rm -f "$STAMP"
        : >"$LOG"
        say "  The lock changed: bringing $(basename "$VENV") up to date."
        return
    fi
    find_python
    rm -rf "$VENV"
    mkdir -p "$VENV" && : >"$OURS" && : >"$LOG" ||
        fail "$VENV cannot be written." "the folder is read-only, or belongs to another user." \
            "copy the project to a folder of yours"
    step "Making $(basename "$VENV") with $PYTHON" "$PYTHON" -m venv "$VENV"
}

uv() { UV_REQUIRE_HASHES=false "$VENV/bin/uv" "$@"; }

install_uv() {
    PIP_USER=0 "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --retries 2 \
        --require-hashes --only-binary :all: -r "$ENVIRONMENT/bootstrap.lock"
}

# shellcheck disable=SC2086  # UV_NO_INDEX_OPTION is empty or one word
install_locked() { uv pip sync --python "$VENV/bin/python" --require-hashes $UV_NO_INDEX_OPTION "$LOCK"; }

install_project() {
    uv pip install --python "$VENV/bin/python" --no-deps --no-build-isolation --offline --editable "$ROOT"
}

# Byte code of what every engine process imports, made with all cores before several processes would each make it.
# The other packages are compiled when something first imports them: of 19,000 files, the series uses 7,500.
compile_python() {
    cd "$VENV/lib/python3.12/site-packages" || return
    "$VENV/bin/python" -m compileall -qq -j 0 -x '/(tests?|testing)/' torch torchvision sglang/srt sglang/kernels \
        sglang/lang megatron/core compressed_tensors openai numpy || true # some files are templates, not valid Python
}

# The torch extension of TransformerEngine, from GPT_OSS_TE_WHEEL or compiled (about a minute on 16 cores).
# FORCE_BUILD: otherwise its setup.py downloads a prebuilt wheel that no hash vouches for.
install_built() {
    local site=$VENV/lib/python3.12/site-packages
    if [ -n "${GPT_OSS_TE_WHEEL:-}" ]; then
        uv pip install --python "$VENV/bin/python" --no-deps --offline "$GPT_OSS_TE_WHEEL"
        return
    fi
    PATH=$VENV/bin:$PATH NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        CPATH=$site/nvidia/cudnn/include:$site/nvidia/nccl/include:$site/include${CPATH:+:$CPATH} \
        uv pip install --python "$VENV/bin/python" --no-deps --no-build-isolation --require-hashes \
        -r "$ENVIRONMENT/gpu-built.lock"
}

check_compiler() {
    [ -n "${GPT_OSS_TE_WHEEL:-}" ] || command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] ||
        fail "no CUDA compiler (nvcc) was found, and profile $PROFILE compiles TransformerEngine's torch extension." \
            "the CUDA 13.0 toolkit is not installed here." \
            "use environment/Dockerfile, or set GPT_OSS_TE_WHEEL to a wheel that was built elsewhere"
}

install() {
    say "Setting up the environment of profile $PROFILE in $(basename "$VENV"):"
    check_disk
    [ "$PROFILE" = cpu ] || check_compiler
    make_venv
    tell_uv
    step "Fetching uv, the installer" install_uv
    step "Installing $(grep -c '^[a-z0-9].*==' "$LOCK") packages (a download of some GB unless the cache has them)" \
        install_locked
    [ "$PROFILE" = cpu ] || step "Compiling TransformerEngine's torch extension" install_built
    step "Installing this project" install_project
    step "Compiling Python files, once" compile_python
    wanted_stamp >"$STAMP.new" && mv "$STAMP.new" "$STAMP"
    say "The environment is ready after $SECONDS s ($(du -s --block-size=MB "$VENV" | cut -f 1))."
}

# One set-up at a time; the second waits and then finds the environment ready.
install_once() {
    command -v flock >/dev/null ||
        fail "the command flock was not found." "a minimal container." "apt-get install util-linux"
    { exec 9>"$VENV.lock"; } 2>/dev/null ||
        fail "$VENV.lock cannot be written." "the folder is read-only, or belongs to another user." \
            "copy the project to a folder of yours"
    if ! flock -n 9; then
        say "Another set-up is at work in this folder; waiting for it."
        flock 9
    fi
    if ! ready; then
        trap interrupted INT TERM HUP
        install
        trap - INT TERM HUP
    fi
    exec 9>&-
}

activate() {
    unset PYTHONDONTWRITEBYTECODE PYTHONHOME # without byte code every start of an engine takes 30 s longer
    export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
    export PYTHONNOUSERSITE=1 JUPYTER_PREFER_ENV_PATH=1 # nothing from outside the lock
}

set_up() {
    check_machine
    ready || install_once
    activate
}
