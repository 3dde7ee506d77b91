#!/usr/bin/env bash
# Installs what building (and with "test", testing) needs, on Debian and its relatives; nothing when it is all there.
# Usage: scripts/setup.sh [build|test]
set -euo pipefail

build=(gcc libc6-dev cmake ninja-build pkg-config libdnnl-dev libpcre2-dev libjansson-dev libxxhash-dev zlib1g-dev libzstd-dev libopenblas0 python3)
fetch=(python3-pip python3-venv)
test=(g++ git libcriterion-dev clang clang-format clang-tidy libclang-rt-dev)

case "${1:-build}" in
build) packages=("${build[@]}") ;;
test) packages=("${build[@]}" "${test[@]}") ;;
*)
    echo "setup: $1: must be build or test" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "setup: no apt-get here; install by hand what these Debian packages hold: ${packages[*]}" >&2
    exit 0
fi

installed() {
    dpkg-query -W -f='${db:Status-Abbrev}' "$1" 2>/dev/null | grep -q '^ii'
}

# A python that has pip needs no package for it.
python3 -m pip --version >/dev/null 2>&1 || packages+=("${fetch[@]}")
missing=()
for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "setup: all ${#packages[@]} packages are installed"
    exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "setup: neither root nor sudo; ask for: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq </dev/null
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null
