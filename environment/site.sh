#!/usr/bin/env bash
# Builds the site: the recorded notebooks, the pages around them, search.
[ -n "${BASH_VERSION:-}" ] || { echo "Run it with bash: bash environment/site.sh" >&2; exit 2; }
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
bash environment/site.sh [FOLDER]

Builds the site into FOLDER (runs/site unless told otherwise) and checks it: every link inside it, alt text,
headings, and that no page loads anything from another host. Nothing is executed: the notebooks are shown as
they were recorded.
Open FOLDER/index.html, or serve it: python3 -m http.server --directory FOLDER --bind 127.0.0.1

Its packages come from environment/site.lock into .venv-site; the course's environment is not touched.
TEXT
}

# As setup.sh's, without what only the course's environment needs (this project, compiled engines).
install() {
    say "Setting up what builds the site in $(basename "$VENV"):"
    check_disk
    make_venv
    tell_uv
    step "Fetching uv, the installer" install_uv
    step "Installing $(grep -c '^[a-z0-9].*==' "$LOCK") packages" install_locked
    wanted_stamp >"$STAMP.new" && mv "$STAMP.new" "$STAMP"
}

build() {
    local out=$1 begin=$SECONDS
    rm -rf "$out/.doctrees"
    python -m sphinx -n -W --keep-going -q -c "$ENVIRONMENT/site" -d "$out/.doctrees" "$ROOT" "$out" ||
        fail "the site was not built; what is wrong stands above." \
            "a broken link, or a page in no table of contents." "mend it, then: bash environment/site.sh"
    python "$ENVIRONMENT/site/check.py" "$out" ||
        fail "the site was built, but does not hold what it promises (above)." \
            "a new page, figure or theme." "mend it, then: bash environment/site.sh"
    rm -rf "$out/.doctrees"
    say "The site is ready after $((SECONDS - begin)) s: $out/index.html"
}

case ${1:-} in -h | --help) usage; exit 0 ;; esac
PROFILE=cpu VENV=$ROOT/.venv-site LOCK=$ENVIRONMENT/site.lock NEED_LINKED_MB=300 NEED_COPIED_MB=500
LOG=$VENV/set-up.log STAMP=$VENV/set-up.stamp OURS=$VENV/made-by-environment-setup
out=${1:-$ROOT/runs/site}
mkdir -p "$out" ||
    fail "$out cannot be made." "a read-only folder, or a file of that name." "name another folder"
out=$(cd "$out" && pwd -P)
if [ -n "$(ls -A "$out")" ]; then
    [ -f "$out/.made-by-site" ] ||
        fail "$out holds something else than a site." "a typing mistake." "name another folder"
    rm -rf "${out:?}"/*
fi
: >"$out/.made-by-site"
set_up
build "$out"
