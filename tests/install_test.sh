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

echo "-- r8: exported symbols are those of the headers; the sonames name the minor version"
for library in "$libdir"/libkvfold*.so; do
    nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | sort -u >"$work/exported"
    grep -rhoE '\bkvf_[a-z0-9_]+\(' "$prefix/include" | tr -d '(' | sort -u >"$work/declared"
    extra=$(comm -23 "$work/exported" "$work/declared")
    [ -s "$work/exported" ] && [ -z "$extra" ] || { echo "$library exports $extra"; exit 1; }
    readelf -d "$library" | grep -qF "[$(basename "$library").0.1]" || { readelf -d "$library"; exit 1; }
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

# Configures in vain, and says why: refuses LABEL "TEXT IN THE MESSAGE" CMAKE ARGUMENTS...
refuses() {
    echo "-- $1"
    if cmake -G Ninja -B "$work/refused" "${@:3}" >"$work/refused.log" 2>&1; then
        echo "it was configured"
        exit 1
    fi
    tr -s ' \n' '  ' <"$work/refused.log" | grep -qF "$2" || { cat "$work/refused.log"; exit 1; }
    rm -rf "$work/refused"
}
mkdir "$work/component"
cat >"$work/component/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(component LANGUAGES C)
find_package(kvfold REQUIRED COMPONENTS ${KVF_COMPONENT})
END
rm -f "$libdir"/cmake/kvfold/kvfoldEngineTargets*.cmake # as a build without the engine installs it
refuses "r13: a component that was not built is named" "component engine: this kvfold was built without it" \
    -S "$work/component" -DCMAKE_PREFIX_PATH="$prefix" -DKVF_COMPONENT=engine
refuses "r13: a component that does not exist is named" "component motor: there is none" \
    -S "$work/component" -DCMAKE_PREFIX_PATH="$prefix" -DKVF_COMPONENT=motor
refuses "r13: a missing header is named with its package" "libxxhash-dev" -S "$here/.." -DKVF_BUILD_ENGINE=OFF \
    -DKVF_BUILD_TESTS=OFF -DKVF_BUILD_BENCH=OFF -DCMAKE_FIND_ROOT_PATH="$work/component" -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY
refuses "r13: a missing library is named with its package" "libdnnl-dev" -S "$here/.." -DKVF_BUILD_TESTS=OFF \
    -DKVF_BUILD_BENCH=OFF -DCMAKE_FIND_ROOT_PATH="$work/component" -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY

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
