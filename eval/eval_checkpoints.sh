#!/usr/bin/env bash
# bash eval_checkpoints.sh RUN_DIR [--dataset sudoku --gen_length 32 ...]
# Evaluates every RUN_DIR/checkpoint-* on the validation split, picks the best, and evaluates that one on the test set,
# once. Settings not given are those the run was trained with (RUN_DIR/run.json); further flags go to eval.py.
exec python -m d1.eval.selection "$@"
