# Part of command.sh, which reads it: batches again and again for equal bytes.
for options in "" "--part vary --fast-activations" "--part vary --heads-per-group 1"; do
    # shellcheck disable=SC2086
    if python3 "$here/determinism.py" "$kvfold" "$quantised" --tight 160KiB $options >log 2>&1; then
        ok "deterministic_answers $options"
    else
        fail "deterministic_answers $options" "$(tail -c 1900 log)"
    fi
done
