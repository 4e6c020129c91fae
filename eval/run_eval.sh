#!/usr/bin/env bash
# bash run_eval.sh [GPU ids]      e.g. `bash run_eval.sh 0 1 2 3` or `bash run_eval.sh 0,1,2,3`
# d1's evaluation: four tasks at three lengths, one process per GPU; then run `python parse_and_get_acc.py results/`.
#
# Settings, all environment variables:
#   MODEL_PATH       model folder or hub name       (default GSAI-ML/LLaDA-8B-Instruct, which needs a GPU)
#   CHECKPOINT_PATH  LoRA adapter                   (default none)
#   TASKS            e.g. "gsm8k sudoku"            (default all four)
#   GEN_LENGTHS      e.g. "128 256"                 (default "128 256 512"; diffusion steps are half of each)
#   BLOCK_LENGTH     tokens per block               (default the model's own, or 32)
#   BATCH_SIZE       (default 8)   OUTPUT_DIR (default results/)
#   EXTRA            further flags of eval.py       (default "--add_reasoning", as in the paper)
# Relative paths count from this folder. Without MODEL_PATH, Countdown and Sudoku use 256 problems each, as many as in
# the paper, but not the same ones (docs/differences.md). A killed run continues when it is started again. The pocket model, on any machine:
#   MODEL_PATH=../pocket/base TASKS=sudoku GEN_LENGTHS="32 40" BLOCK_LENGTH=8 BATCH_SIZE=128 EXTRA= bash run_eval.sh
set -euo pipefail
cd "$(dirname "$0")"

read -r -a gpus <<<"$(echo "$*" | tr ',' ' ')"
if ((${#gpus[@]})); then
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]}")
    export CUDA_VISIBLE_DEVICES
fi
devices=$(python -c "import torch; print(torch.cuda.device_count())")
if ((${#gpus[@]} > devices)); then
    echo "run_eval.sh: ${#gpus[@]} GPUs were asked for (${gpus[*]}), but $devices were found" >&2
    exit 1
fi

if [[ -z "${MODEL_PATH:-}" ]] && ((devices == 0)); then
    cat >&2 <<'MESSAGE'
run_eval.sh: no GPU found and no MODEL_PATH given: the default, GSAI-ML/LLaDA-8B-Instruct, needs a GPU of 24 GB or more.
The pocket model runs on this machine in seconds:
  MODEL_PATH=../pocket/base TASKS=sudoku GEN_LENGTHS="32 40" BLOCK_LENGTH=8 BATCH_SIZE=128 EXTRA= bash run_eval.sh
MESSAGE
    exit 1
fi

output_dir=${OUTPUT_DIR:-results/}
# All lines (-d ''); read ends with status 1 at the end of the text.
read -r -d '' -a lengths <<<"${GEN_LENGTHS:-128 256 512}" || true
read -r -d '' -a extra <<<"${EXTRA---add_reasoning}" || true
launch=(python)
if ((devices > 1)); then
    launch=(torchrun --standalone --nproc_per_node "$devices")
fi
for task in ${TASKS:-gsm8k math countdown sudoku}; do
    limit=()
    if [[ -z "${MODEL_PATH:-}" && ($task == countdown || $task == sudoku) ]]; then
        limit=(--limit 256)
    fi
    "${launch[@]}" eval.py \
        --model_path "${MODEL_PATH:-GSAI-ML/LLaDA-8B-Instruct}" \
        --checkpoint_path "${CHECKPOINT_PATH:-}" \
        --dataset "$task" \
        --gen_length "${lengths[@]}" \
        ${BLOCK_LENGTH:+--block_length "$BLOCK_LENGTH"} \
        --batch_size "${BATCH_SIZE:-8}" \
        --output_dir "$output_dir" \
        ${limit[@]+"${limit[@]}"} ${extra[@]+"${extra[@]}"} # bash before 4.4 calls an empty list unbound
done
echo "Now: python parse_and_get_acc.py $output_dir"
