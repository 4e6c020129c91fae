#!/usr/bin/env bash
# diffu-GRPO with d1's settings on the GPUs of this machine:
#   CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 bash run.sh
#   DATASET=countdown NUM_ITER=8 MODEL_PATH=../SFT/runs/llada-s1/merged bash run.sh --learning_rate 1e-6
# Another method, from d1/rl/methods/ or a file of yours, with its own mu, learning rate and completions per prompt:
#   METHOD=espo DATASET=sudoku bash run.sh
# The pocket model, on any machine:
#   CONFIG=pocket.yaml bash run.sh    # with METHOD, GPUS and PYTHON alone; other settings as flags
# Settings come from environment variables, with d1's values as defaults; arguments are forwarded to
# diffu_grpo_train.py. ACCELERATE_CONFIG names another launch configuration, such as ../launch/zero3.yaml.
# Relative paths count from this folder.
# The number of completions per optimizer step (COMPLETIONS, d1: 96) does not depend on the number of GPUs.
# Also: PER_DEVICE (6), TEMPERATURE, GPUS (all visible), OUTPUT_DIR (../runs/RUN_NAME), RUN_NAME, RUN_PREFIX,
# PORT (12346), PYTHON; and on several nodes NODES, NODE_RANK and MAIN_IP.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # CUDA reads the list up to its first negative number; empty: no GPU
    visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d' | grep -c . || true)
elif command -v nvidia-smi >/dev/null; then
    visible=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
else
    visible=0
fi

check_number() { # NAME MINIMUM: exits unless the variable is a whole number of at least MINIMUM
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]*)$ ]] || [ "${!1}" -lt "$2" ]; then
        echo "run.sh: $1 must be a whole number of at least $2, got ${!1}" >&2
        exit 1
    fi
}

read_flag() { # FLAG VALUE: sets the variable of the same setting
    case ${1//-/_} in # --model-path is --model_path
        __method) METHOD=$2 ;;
        __dataset | __task) DATASET=$2 ;;
        __model_path | __model_name) MODEL_PATH=$2 ;;
        __run_name) RUN_NAME=$2 ;;
        __num_iterations) NUM_ITER=$2 ;;
        __per_device_train_batch_size) PER_DEVICE=$2 ;;
        __gradient_accumulation_steps)
            echo "run.sh: $1 follows from COMPLETIONS, the completions per optimizer step: set COMPLETIONS instead" >&2
            exit 1
            ;;
    esac
}

NODES=${NODES:-1}
check_number NODES 1
PYTHON=${PYTHON:-python}
if [ -z "${CONFIG:-}" ]; then # mu, the temperature, the folder and the accumulation follow from variables or flags
    flag=
    for word in "$@"; do
        case $word in
            --*=*) read_flag "${word%%=*}" "${word#*=}" ;;
            *) read_flag "$flag" "$word" ;;
        esac
        flag=$word
    done
fi
if [ -n "${METHOD:-}" ]; then
    set -- --method "$METHOD" "$@"
fi
METHOD=${METHOD:-d1}

if [ -n "${CONFIG:-}" ]; then # a complete yaml, such as pocket.yaml, whose batch is for one process
    for name in DATASET MODEL_PATH OUTPUT_DIR RUN_NAME RUN_PREFIX NUM_ITER TEMPERATURE PER_DEVICE COMPLETIONS \
        ACCELERATE_CONFIG; do
        if [ -n "${!name:-}" ]; then
            echo "run.sh: $name is not read with CONFIG: give the flag instead, such as --dataset, --model_path," \
                "--output_dir, --num_iterations" >&2
            exit 1
        fi
    done
    if [ "$NODES" -gt 1 ]; then
        echo "run.sh: NODES is not read with CONFIG, which runs on this machine alone: start accelerate launch on each" \
            "node instead" >&2
        exit 1
    fi
    GPUS=${GPUS:-1}
    check_number GPUS 0
    if [ "$GPUS" -eq 0 ]; then # one process on the CPU
        export CUDA_VISIBLE_DEVICES=
        GPUS=1
    fi
    launch_config=../launch/single_gpu.yaml # also on a CPU; without a file, Accelerate reads the user's default
    if [ "$GPUS" -gt 1 ]; then
        launch_config=../launch/ddp.yaml
    fi
    exec "$PYTHON" -m accelerate.commands.launch --quiet --config_file "$launch_config" --num_processes "$GPUS" \
        --num_machines 1 --mixed_precision no --dynamo_backend no diffu_grpo_train.py --config "$CONFIG" "$@"
fi
GPUS=${GPUS:-$visible}
check_number GPUS 0
if [ "$GPUS" -eq 0 ] && [ -z "${MODEL_PATH:-}" ]; then
    echo "run.sh: no GPU found and no MODEL_PATH given: the default (LLaDA-8B, 8 GPUs) cannot run here." >&2
    echo "The pocket model can:  CONFIG=pocket.yaml bash run.sh" >&2
    exit 1
fi
if [ "$GPUS" -eq 0 ] && [ "$NODES" -gt 1 ]; then
    echo "run.sh: NODES=$NODES needs GPUs, and GPUS is 0: set GPUS to the number of GPUs per node" >&2
    exit 1
fi

DATASET=${DATASET:-gsm8k}
MODEL_PATH=${MODEL_PATH:-GSAI-ML/LLaDA-8B-Instruct}
case $DATASET in # d1's temperature and mu
    sudoku) temperature=0.3 mu=8 ;;
    countdown) temperature=0.9 mu=8 ;;
    *) temperature=0.9 mu=12 ;;
esac
if [ "$METHOD" = d1 ]; then # other methods have their own
    NUM_ITER=${NUM_ITER:-$mu} TEMPERATURE=${TEMPERATURE:-$temperature} suffix=
else
    suffix=_$(basename "$METHOD" .py)
fi
suffix+=${NUM_ITER:+_mu$NUM_ITER}
RUN_NAME=${RUN_NAME:-${RUN_PREFIX:-$(basename "$DATASET" .py)_$(basename "$MODEL_PATH")}$suffix}
OUTPUT_DIR=${OUTPUT_DIR:-../runs/$RUN_NAME}
if [ "$GPUS" -eq 0 ]; then
    ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-../launch/cpu.yaml}
    set -- --bf16 false --load_in_4bit false --dtype float32 "$@"
fi
ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-accelerate.yaml}
if [ "$METHOD" = coupled-grpo ]; then # groups of ten
    COMPLETIONS=${COMPLETIONS:-80} PER_DEVICE=${PER_DEVICE:-10}
fi
COMPLETIONS=${COMPLETIONS:-96}
PER_DEVICE=${PER_DEVICE:-6}
check_number COMPLETIONS 1
check_number PER_DEVICE 1

processes=$((NODES * (GPUS > 0 ? GPUS : 1)))
if [ $((COMPLETIONS % (PER_DEVICE * processes))) -ne 0 ]; then
    echo "run.sh: COMPLETIONS=$COMPLETIONS is not a multiple of PER_DEVICE=$PER_DEVICE x $processes processes" >&2
    exit 1
fi
accumulation=$((COMPLETIONS / (PER_DEVICE * processes)))
echo "run.sh: $processes processes x $PER_DEVICE completions x $accumulation accumulation = $COMPLETIONS per step"

launch=(--config_file "$ACCELERATE_CONFIG" --num_processes "$processes" --main_process_port "${PORT:-12346}")
if [ "$NODES" -gt 1 ]; then
    launch+=(--num_machines "$NODES" --machine_rank "${NODE_RANK:?}" --main_process_ip "${MAIN_IP:?}")
fi
exec "$PYTHON" -m accelerate.commands.launch --quiet "${launch[@]}" diffu_grpo_train.py \
    --config slurm_scripts/train.yaml \
    --model_path "$MODEL_PATH" \
    --dataset "$DATASET" \
    ${NUM_ITER:+--num_iterations "$NUM_ITER"} \
    ${TEMPERATURE:+--temperature "$TEMPERATURE"} \
    --per_device_train_batch_size "$PER_DEVICE" \
    --gradient_accumulation_steps "$accumulation" \
    --run_name "$RUN_NAME" \
    --output_dir "$OUTPUT_DIR" \
    "$@"
