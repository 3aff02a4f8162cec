#!/bin/sh
# Makes a locked environment: every package by hash from a folder of wheels, DeepSpeed from its source with the ops
# prebuilt for a named CPU architecture. The Dockerfile and the venv engine both call it, so that both get the same.
# It uses no network and no package index.
#
#   venv.sh packages    makes $VENV from $LOCK
#   venv.sh ops         builds the packages of $FROM_SOURCE against it, installs them, compiles byte code
#
# Environment: VENV (final path; scripts hold it), PYTHON, WHEELS (folder), LOCK, BUILD_LOCK, FROM_SOURCE (names),
# OPS (DeepSpeed op names), ARCH (as GCC's -march), ACCELERATOR (cpu or cuda), WORK (scratch; without a space in its
# name, which torch's build does not survive), RECIPE (folder of this script).
set -eu
: "${VENV:?}" "${PYTHON:?}" "${WHEELS:?}" "${LOCK:?}" "${BUILD_LOCK:?}" "${WORK:?}" "${RECIPE:?}"

# Nothing of the caller's pip configuration may steer an offline, hash-checked install.
for name in $(env | sed -n 's/^\(PIP_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS=$WHEELS PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
PIP_ROOT_USER_ACTION=ignore PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1
export PIP_CONFIG_FILE PIP_NO_INDEX PIP_FIND_LINKS PIP_NO_CACHE_DIR PIP_DISABLE_PIP_VERSION_CHECK
export PIP_ROOT_USER_ACTION PYTHONHASHSEED PYTHONDONTWRITEBYTECODE
umask 022

tools=$WORK/tools

# Prints the lock without (or, with $1 = only, with nothing but) the packages that are built from source.
lock_part() {
    awk -v names=" ${FROM_SOURCE:-} " -v only="$1" '
        /^[A-Za-z0-9]/ { name = $1; sub(/==.*/, "", name); source = index(names, " " name " ") > 0 }
        /^ *#/ { next }
        (only == "only") == source { print }
    ' "$LOCK"
}

packages() {
    rm -rf "$VENV" "$WORK"
    mkdir -p "$WORK"
    "$PYTHON" -m venv --without-pip "$VENV"
    "$PYTHON" -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --require-hashes --no-deps -r "$BUILD_LOCK"
    lock_part without > "$WORK/wheels.txt"
    "$tools/bin/python" -m pip --python "$VENV/bin/python" install --quiet --require-hashes --no-deps --no-compile \
        --only-binary :all: -r "$WORK/wheels.txt"
}

build_one() {
    name=$1
    set -- "$WHEELS/$name"-*.tar.gz
    [ $# -eq 1 ] && [ -f "$1" ] || { echo "$WHEELS: expected one source archive of $name, found: $*" >&2; exit 1; }
    sum=$(sha256sum < "$1")
    lock_part only | grep -q "sha256:${sum%% *}" ||
        { echo "$1: its SHA-256 ${sum%% *} is not in $LOCK" >&2; exit 1; }
    rm -rf "$WORK/source"
    mkdir -p "$WORK/source"
    tar -xzf "$1" -C "$WORK/source" --strip-components=1 --no-same-owner
    if [ "$name" = deepspeed ]; then
        "$tools/bin/python" "$RECIPE/deepspeed_arch.py" "$WORK/source" "$ARCH"
    fi
    # DeepSpeed asks for debug information: a third of the compile time, ten times the size, and this folder's name in
    # the ops. The last -g counts.
    printf '#!/bin/sh\nexec g++ "$@" -g0\n' > "$WORK/c++"
    chmod +x "$WORK/c++"
    for op in ${OPS:-}; do
        export "DS_BUILD_$(echo "$op" | tr '[:lower:]' '[:upper:]')=1"
    done
    CXX=$WORK/c++ DS_ACCELERATOR=$ACCELERATOR DS_ENABLE_NINJA=1 LDFLAGS=-Wl,--strip-debug \
        SOURCE_DATE_EPOCH=1767225600 \
        MAX_JOBS=$(nproc) "$tools/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation \
        --wheel-dir "$WORK/built" "$WORK/source"
    "$tools/bin/python" -m pip --python "$VENV/bin/python" install --quiet --no-deps --no-compile \
        "$WORK/built/$name"-*.whl
}

ops() {
    # The build needs the locked torch: lend it the environment that was just made.
    for site in "$VENV"/lib/python3.*/site-packages; do
        echo "$site" > "$(echo "$tools"/lib/python3.*/site-packages)/locked.pth"
    done
    for source_name in ${FROM_SOURCE:-}; do build_one "$source_name"; done
    # Byte code that nothing re-checks: imports are fast on a read-only root, and bytes do not depend on file times.
    # It ends with 1 for files that are not for this Python (templates; torch's tests of newer syntax): those stay as
    # they are, and nobody imports them.
    "$VENV/bin/python" -m compileall -qq -j 0 --invalidation-mode unchecked-hash "$VENV/lib" || true
    rm -rf "$WORK"
}

case "${1:-}" in
    packages) packages ;;
    ops) ops ;;
    *) echo "usage: $0 packages|ops" >&2; exit 2 ;;
esac
