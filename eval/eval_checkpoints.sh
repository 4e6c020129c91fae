#!/usr/bin/env bash
# bash eval_checkpoints.sh RUN_DIR [--dataset sudoku --gen_length 32 ...]
# Evaluates every RUN_DIR/checkpoint-* on the validation split, selects the best, and evaluates it once on the test set.
# The default settings are those of training (RUN_DIR/run.json); further flags are forwarded to eval.py.
exec python -m d1.eval.selection "$@"
