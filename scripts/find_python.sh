#!/bin/sh
# Print the Python that `make` builds its virtual environment with, or say in plain words what this machine lacks.
# An interpreter named in $PYTHON is the only candidate; otherwise the first one that is new enough.
set -u
needed_kib=$((${NEEDED_GIB:-4} * 1024 * 1024))
oldest="3.11"

fail() {
    echo "make: $1" >&2
    shift
    for line in "$@"; do echo "      $line" >&2; done
    exit 1
}

new_enough() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON is not a program on this machine"
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1), Python $oldest or newer is needed"
    found=$PYTHON
else
    found=
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            found=$candidate
            break
        fi
    done
    [ -n "$found" ] || fail "no Python $oldest or newer was found (python3 is: $(python3 -V 2>&1 || echo absent))" \
        "install one, or name it: make PYTHON=/path/to/python3.12 ..."
fi

"$found" -c 'import venv, ensurepip' 2>/dev/null || fail "$found has no venv module or no ensurepip" \
    "on Debian and Ubuntu: apt-get install python3-venv"

"$found" -c 'import ssl' 2>/dev/null || fail "$found was built without TLS, so pip cannot download anything"

free_kib=$(df -Pk . 2>/dev/null | awk 'NR == 2 { print $4 }')
if [ -n "$free_kib" ] && [ "$free_kib" -lt "$needed_kib" ]; then
    fail "$((free_kib / 1024)) MiB are free here, the virtual environment needs $((needed_kib / 1024)) MiB" \
        "free some space, or lower NEEDED_GIB if you know better"
fi

[ -w . ] || fail "this directory is not writable, so .venv cannot be made in it"

command -v "$found"
