#!/usr/bin/env bash
# From a fresh clone to a trained, resumed and sampled model, on two CPU processes: bash scripts/quickstart.sh
set -euo pipefail
source "$(dirname "$0")/env.sh"

steps=600
train() {
    torchrun --standalone --nproc_per_node=2 -m titanlite.train train_configs/debug.toml \
        --checkpoint.enable --lr_scheduler.total_steps $steps --training.steps "$1"
}
start=$SECONDS
echo "== 1. train the first half on Python's standard library"
train $((steps / 2))
echo "== 2. the same command with more steps resumes"
train $steps
echo "== 3. a sample"
titanlite generate outputs/debug -p "    def __init__(self" --max_new_tokens 300 --temperature 0.5
echo
echo "== done in $((SECONDS - start)) s. The run lies in outputs/debug: metrics.jsonl, checkpoint/, logs/,"
echo "   tb/ (tensorboard --logdir outputs/debug/tb) and config.toml, which runs again as it is."
