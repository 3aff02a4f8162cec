# Each recipe is a name for one command; `ferry --help` has them all. `./just` needs no `just`: it brings its own.

set positional-arguments

project := justfile_directory()
export PATH := project / ".venv/bin:" + env("PATH")

# List the recipes.
_default:
    @just --justfile {{ quote(justfile()) }} --list

# Make .venv from lockfiles/runner.txt, if it is not there.
_setup:
    @{{ quote(project / "just") }} --setup-only

# Move a small real run between two servers, and compare it with one that never moved.
[no-cd, no-exit-message]
demo *args: _setup
    @{{ quote(project / "bin/engine") }} || true
    @ferry demo "$@"

# Check a bundle: every byte, then what the bytes mean.
[no-cd, no-exit-message]
verify *args: _setup
    @ferry verify "$@"

# Start a prepared run, in the container that its profile asks for and in nothing else.
[no-cd, no-exit-message]
resume *args: _setup
    @ferry resume "$@"

# Say how a run goes, or went.
[no-cd, no-exit-message]
status *args: _setup
    @ferry status "$@"

# Ask a run for a complete checkpoint at the next update, and wait for its end.
[no-cd, no-exit-message]
stop *args: _setup
    @ferry stop "$@"

# Make a stopped run into a bundle for the next server, and seal the place that it leaves.
[no-cd, no-exit-message]
pack *args: _setup
    @ferry pack "$@"

# Build an image of images/, if the engine does not have it.
image name="cpu": _setup
    @ferry image build "$1"

# See that an image does what it is for: imports, ops without a compiler, a moved run that is EXACT.
smoke name="cpu": _setup
    @ferry image smoke "$1"

# See that a Docker engine answers; as root on Debian, install and start one.
engine:
    @bin/engine

# All tests, with real containers. Arguments go to pytest.
test *args: _setup engine (image "cpu")
    @pytest "$@"

# Everything that reads the code and runs none of it.
check: _setup
    ruff check .
    ruff format --check .
    mypy
    lint-imports
    shellcheck just .ci/run bin/* images/*.sh images/base/*.sh
    hadolint Dockerfile
    actionlint .github/workflows/*.yml
    ferry image lint

# Damaged and hostile lists, archives and pickles: each must be answered or refused.
fuzz *args: _setup
    @cd {{ quote(project) }} && python -m tests.fuzz.readers "$@"

# Side-by-side measurements; prints ratios.
bench *args: _setup
    @cd {{ quote(project) }} && python -m bench "$@"

# Make the locks again from lockfiles/*.in.
lock: _setup
    @bin/lock

# Take the base's package versions as they were last made here. Look at the difference before you commit it.
base-relock:
    cp "$(ls -td .ferry/base/*/ | head -n 1)"*.packages images/base/ && git diff --stat images/base

# Remove what is made here: .venv, and .ferry with its bases, wheels and builds. Images stay in the engine.
clean:
    rm -rf .venv .ferry .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
