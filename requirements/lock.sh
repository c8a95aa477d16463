#!/usr/bin/env bash
# Updates the locks: exact versions with the hashes of all files, one resolution for every supported Python and system.
# The largest lock is resolved first and constrains the others, so that their versions are compatible.
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

# Clients of other systems. Each gets its own folder, because an environment can have only one version of a package.
client() {
    local target=requirements/interop/$1-$2.lock
    {
        echo "# A real client that the tests run unmodified; renewed by \`make lock\`."
        echo "$1${3:-}==$2" | uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
            --no-emit-index-url --no-emit-find-links -
    } >"$target.new"
    mv "$target.new" "$target"
}

lock dev --extra dev
lock demo --extra demo --constraints requirements/dev.lock
lock base --constraints requirements/dev.lock

{
    echo "# What audits the other locks, in a folder of its own; renewed by \`make lock\`."
    echo "pip-audit" | uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links -
} >requirements/audit.lock.new
mv requirements/audit.lock.new requirements/audit.lock

{
    echo "# What makes the site of the documentation, in a folder of its own; renewed by \`make lock\`."
    echo "zensical" | uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links -
} >requirements/site.lock.new
mv requirements/site.lock.new requirements/site.lock

client cursus-client 0.1.1
client iggy-py 0.4.0
for version in 0.5.0 0.6.0 0.7.0 0.8.0 0.9.0 0.9.1.dev5; do
    client apache-iggy "$version"
done
client faststream 0.7.8 '[kafka]'
client quixstreams 3.28.1
client dlt 1.31.0
client dagster 1.13.29
client pytest-asyncio 1.5.0
