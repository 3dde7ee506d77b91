#!/usr/bin/env bash
# Installs a build into a temporary prefix, moves it, and builds and runs programs against it: through the CMake package and
# through pkg-config, in C and in C++, against the shared and the static libraries. Usage: install_test.sh BUILD_FOLDER
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
build=${1:?usage: install_test.sh BUILD_FOLDER}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" >"$work/log"
mv "$work/first" "$work/prefix" # nothing may remember where it was installed
prefix=$work/prefix
libdir=$(dirname "$(find "$prefix" -name libkvfold.so)")

echo "-- CMake package"
cmake -G Ninja -S "$here/install" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DKVF_EXAMPLE="$here/../examples/embed.c" \
    --log-level=WARNING >>"$work/log"
cmake --build "$work/consumer" >>"$work/log" || { tail -n 40 "$work/log"; exit 1; }
for program in "$work"/consumer/use_*; do
    echo "-- $(basename "$program")"
    "$program"
done

echo "-- pkg-config"
export PKG_CONFIG_PATH=$libdir/pkgconfig LD_LIBRARY_PATH=$libdir
cc=${CC:-cc} cxx=${CXX:-c++}
# shellcheck disable=SC2046 # flags are words
$cc -std=c11 "$here/../examples/embed.c" -o "$work/pc_c" $(pkg-config --cflags --libs kvfold)
# shellcheck disable=SC2046
$cxx -std=c++17 "$here/install/consumer.cpp" -o "$work/pc_cxx" $(pkg-config --cflags --libs kvfold)
"$work/pc_c"
"$work/pc_cxx"
if [ -f "$libdir/pkgconfig/kvfold_engine.pc" ]; then
    # shellcheck disable=SC2046
    $cc -std=c11 "$here/install/engine.c" -o "$work/pc_engine" $(pkg-config --cflags --libs kvfold_engine)
    "$work/pc_engine"
    "$prefix/bin/kvfold" --help >/dev/null
fi

echo "-- libkvfold needs libc alone"
needed=$(objdump -p "$libdir/libkvfold.so" | sed -n 's/^ *NEEDED *//p')
for library in $needed; do
    case $library in
    libc.so.* | libm.so.* | libpthread.so.* | libgcc_s.so.* | ld-linux*) ;;
    *)
        echo "libkvfold.so needs $library"
        exit 1
        ;;
    esac
done
