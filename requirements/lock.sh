#!/usr/bin/env bash
# Renews the locks: exact versions with the hashes of all their files, one solution for every supported Python and system.
# Compatible versions in all three files: the largest is solved first and constrains the others.
set -euo pipefail
cd "$(dirname "$0")/.."

lock() {
    local target=requirements/$1.lock
    shift
    {
        echo "# Exact versions and hashes; renewed by \`make lock\` from pyproject.toml."
        uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
            --no-emit-index-url --no-emit-find-links pyproject.toml requirements/build.in "$@"
    } >"$target.new"
    mv "$target.new" "$target"
}

lock dev --extra dev
lock demo --extra demo --constraints requirements/dev.lock
lock base --constraints requirements/dev.lock
