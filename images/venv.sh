#!/bin/sh
# Makes a locked environment: every package by hash from a folder of wheels, DeepSpeed from its source with the ops
# prebuilt for a named CPU architecture. The Dockerfile and the venv engine both call it, so that both get the same.
# Only `fetch` uses a network or a package index.
#
#   venv.sh fetch          puts every file that the locks name into $WHEELS, with the caller's pip configuration
#   venv.sh tools          makes $TOOLS: pip, and what building from source needs
#   venv.sh packages PART  installs one part of $LOCK into $VENV, which the first call makes: the PARTth list of $LAYERS
#                          (1, 2, ...), or `rest`: what is in no list
#   venv.sh build          builds the packages of $FROM_SOURCE against $VENV, which it only reads, into $BUILT
#   venv.sh install        installs what lies in $BUILT into $VENV
#
# Environment: VENV (final path; scripts hold it), PYTHON, WHEELS (folder), LOCK, BUILD_LOCK, FROM_SOURCE (names),
# LAYERS (lists of names or patterns, '|' between two lists; the first that fits a package has it), OPS (DeepSpeed op
# names), ARCH (as GCC's -march), ACCELERATOR (cpu or cuda), TOOLS, BUILT, WORK (scratch; without a space in its name,
# which torch's build does not survive), RECIPE (folder of this script). With SOURCE_DATE_EPOCH every file and folder
# that a step writes gets that time, and nothing else is touched: a step is then the same layer each time.
set -euf
: "${VENV:?}" "${PYTHON:?}" "${WHEELS:?}" "${LOCK:?}" "${BUILD_LOCK:?}" "${WORK:?}" "${TOOLS:?}" "${BUILT:?}" "${RECIPE:?}"
umask 022

# Nothing of the caller's pip configuration may steer an offline, hash-checked install.
alone() {
    for name in $(env | sed -n 's/^\(PIP_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
    PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS=$WHEELS PIP_NO_CACHE_DIR=1
    export PIP_CONFIG_FILE PIP_NO_INDEX PIP_FIND_LINKS PIP_NO_CACHE_DIR
}
PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1
export PIP_DISABLE_PIP_VERSION_CHECK PIP_ROOT_USER_ACTION PYTHONHASHSEED PYTHONDONTWRITEBYTECODE

# Prints the name of every locked package that part $1 has; `source` is the part of those in FROM_SOURCE.
names_of() {
    sed -n 's/^\([A-Za-z0-9][A-Za-z0-9._-]*\)==.*/\1/p' "$LOCK" | while read -r name; do
        part=rest
        number=0
        old_ifs=$IFS
        IFS='|'
        for list in ${LAYERS:-}; do
            number=$((number + 1))
            IFS=$old_ifs
            for pattern in $list; do
                # The pattern is one on purpose.
                # shellcheck disable=SC2254
                case $part,$name in rest,$pattern) part=$number ;; esac
            done
            IFS='|'
        done
        IFS=$old_ifs
        case " ${FROM_SOURCE:-} " in *" $name "*) part=source ;; esac
        [ "$part" != "$1" ] || echo "$name"
    done
}

# Prints the lines of the lock for part $1.
lock_part() {
    awk -v names=" $(names_of "$1" | tr '\n' ' ')" '
        /^[A-Za-z0-9]/ { name = $1; sub(/==.*/, "", name); wanted = index(names, " " name " ") > 0 }
        /^ *#/ { next }
        wanted { print }
    ' "$LOCK"
}

# Gives everything that is newer than $1 in $VENV, and byte code made of it, the one time that all of an image has.
# Byte code is checked by nothing at run time: imports are fast on a read-only root, and its bytes do not depend on
# file times. Sources that are not for this Python (templates; torch's tests of newer syntax) have none, and nobody
# imports them: compileall says 1 then, and xargs 123.
finish() {
    find "$VENV/lib" -name '*.py' -newer "$1" -print0 | sort -z |
        xargs -0 -r -n 400 -P "$(nproc)" "$VENV/bin/python" -m compileall -qq --invalidation-mode unchecked-hash ||
        [ $? -eq 123 ]
    if [ -n "${SOURCE_DATE_EPOCH:-}" ]; then
        find "$VENV" "${VENV%/*}" -maxdepth 0 -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
        find "$VENV" \( -newermt "@$SOURCE_DATE_EPOCH" -o ! -newermt "@$((SOURCE_DATE_EPOCH - 1))" \) \
            -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    fi
    rm -rf "$WORK"
}

# A file that is older than all that a step writes.
begin() {
    mkdir -p "$WORK"
    touch -d '-1 second' "$WORK/begun"
}

fetch() {
    mkdir -p "$WORK" "$WHEELS"
    "$PYTHON" -m venv "$WORK/pip"
    lock_part source > "$WORK/source.txt"
    for part in 1 2 3 rest; do lock_part "$part"; done > "$WORK/wheels.txt"
    pip() {
        "$WORK/pip/bin/python" -m pip "$@" --quiet --progress-bar off --no-deps --require-hashes
    }
    pip download --dest "$WHEELS" --only-binary :all: -r "$WORK/wheels.txt"
    pip download --dest "$WHEELS" --only-binary :all: -r "$BUILD_LOCK"
    pip install -r "$BUILD_LOCK"
    [ ! -s "$WORK/source.txt" ] ||
        pip download --dest "$WHEELS" --no-build-isolation --no-binary :all: -r "$WORK/source.txt"
    rm -rf "$WORK"
}

tools() {
    alone
    rm -rf "$TOOLS"
    "$PYTHON" -m venv "$TOOLS"
    "$TOOLS/bin/python" -m pip install --quiet --require-hashes --no-deps -r "$BUILD_LOCK"
}

packages() {
    alone
    begin
    lock_part "$1" > "$WORK/wanted.txt"
    if [ ! -d "$VENV" ]; then "$PYTHON" -m venv --without-pip "$VENV"; fi
    if [ -s "$WORK/wanted.txt" ]; then
        "$TOOLS/bin/python" -m pip --python "$VENV/bin/python" install --quiet --require-hashes --no-deps --no-compile \
            --only-binary :all: -r "$WORK/wanted.txt"
    fi
    finish "$WORK/begun"
}

build_one() {
    name=$1
    set +f
    set -- "$WHEELS/$name"-*.tar.gz
    set -f
    [ $# -eq 1 ] && [ -f "$1" ] || { echo "$WHEELS: expected one source archive of $name, found: $*" >&2; exit 1; }
    sum=$(sha256sum < "$1")
    lock_part source | grep -q "sha256:${sum%% *}" ||
        { echo "$1: its SHA-256 ${sum%% *} is not in $LOCK" >&2; exit 1; }
    rm -rf "$WORK/source"
    mkdir -p "$WORK/source"
    tar -xzf "$1" -C "$WORK/source" --strip-components=1 --no-same-owner
    if [ "$name" = deepspeed ]; then
        "$TOOLS/bin/python" "$RECIPE/deepspeed_source.py" "$WORK/source" "$ARCH"
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
        MAX_JOBS=$(nproc) "$TOOLS/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation \
        --wheel-dir "$BUILT" "$WORK/source"
}

build() {
    alone
    mkdir -p "$WORK" "$BUILT"
    # The build needs the locked torch: lend it the environment.
    set +f
    for site in "$VENV"/lib/python3.*/site-packages; do
        echo "$site" > "$(echo "$TOOLS"/lib/python3.*/site-packages)/locked.pth"
    done
    set -f
    for source_name in ${FROM_SOURCE:-}; do build_one "$source_name"; done
    rm -rf "$WORK"
}

install() {
    alone
    begin
    # By name and not by path, which pip would write down.
    for source_name in ${FROM_SOURCE:-}; do
        "$TOOLS/bin/python" -m pip --python "$VENV/bin/python" install --quiet --no-deps --no-compile \
            --find-links "$BUILT" --only-binary :all: "$source_name"
    done
    finish "$WORK/begun"
}

case "${1:-}" in
    fetch | tools | build | install) "$1" ;;
    packages) packages "${2:?which part}" ;;
    *) sed -n 's/^#   //p' "$0" >&2; exit 2 ;;
esac
