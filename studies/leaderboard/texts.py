"""The sentences of docs/leaderboard.md, for `report.py`."""

INTRODUCTION = """# Which method is best at the same compute?

{answer}Written by `make studies` from {runs} lines in [studies/leaderboard/data](../studies/leaderboard/README.md). The
[protocol](../studies/leaderboard/PROTOCOL.md) says what was run and how it is judged. It is older than every run;
its changes have dates.

{cut}Compute: 1 per token of a forward pass, 2 for its backward pass, rollouts included. Each budget has its own
runs, whose learning rate falls to 0. Methods that are behind on validation problems were run with three seeds at
the smaller budget, and not at the larger one.

Solved: percent of the sealed problems, by the exact sampler, with the 95% interval over seeds and problems (two-way
bootstrap). Rank: among the methods with eight seeds, what the separated pairs leave open; two methods are separated
if Holm's p-value of their difference, over all pairs of these methods, is below 0.05. Methods that share a letter
under "ties" are not separated. "Not worse": the one-sided 95% interval of the difference lies above -2 points. *:
built here on validation problems.

{figures}## What it means

{reading}

"""
ANSWER = """**Start with `{method}`.** Of the published methods, it has the highest mean in {first} of {tables}
tables{others}, and it is separated from {reference} in {separated}. {leader}. The models
are small: see [how far this speaks for 8B models](#how-far-this-speaks-for-8b-models).

"""
PLACES = """![Accuracy of all methods with intervals at {budget:,} tokens, one panel per setup](leaderboard.svg)

Final models at {budget:,} tokens. The dashed line is the start.

"""
CURVES = """![Validation problems solved: the five best and d1, mean and range of three seeds](leaderboard_curves.svg)

The same runs on the way: the five best methods and d1 on validation problems. Points are means, bars the range of
three seeds.

"""
EIGHT_BILLION = r"""## How far this speaks for 8B models

The models here have 0.2 to 0.5 million parameters, in one table 2.1 million, all of them trained, and completions of
24 to 32 tokens. RL recovers a skill that their pretraining hid on purpose. No 8B model has been trained with this
library yet. Rules for a fair comparison carry over: tune the rate of every method, count the same compute, run
several seeds. Do not expect that the rates, the sizes of differences or the order of the best methods carry over.

The framework DARE ([2604.04215](https://arxiv.org/abs/2604.04215)) reran five of these methods on LLaDA-8B. It
gives all of them the same settings (5e-7, one update per rollout, no KL penalty, temperature 0.6), so its "d1" and
"spg" are not those of their authors. Percent solved, without intervals:

| | base | d1 | coupled-grpo | cj-grpo | spg | bgpo |
| --- | --- | --- | --- | --- | --- | --- |
| GSM8K | 76.5 | 83.7 | 85.3 | 85.6 | 83.5 | 82.3 |
| Countdown | 16.8 | 10.7 | 77.9 | 65.2 | 10.1 | 10.0 |
| Sudoku | 26.2 | 31.8 | 21.3 | 25.0 | 27.9 | 42.6 |

To compare two methods on LLaDA-8B at equal compute, first choose the rate of each on validation problems, then run
several seeds, each like this one. A budget of 1e9 tokens is 1.6e19 floating-point operations (2 per weight and token):

```bash
accelerate launch --config_file diffu-grpo/accelerate.yaml --num_processes 8 diffu-grpo/diffu_grpo_train.py \
    --config recipes/llada-8b-instruct-rl.yaml --method tracerl --learning_rate 3e-6 --seed 0 \
    --lr_scheduler_type linear --warmup_steps 0 --max_compute_tokens 1000000000 --max_steps 100000 \
    --per_device_train_batch_size 8 --rollout_batch_size 8 --output_dir runs/tracerl-0
python -m d1 eval --model_path GSAI-ML/LLaDA-8B-Instruct --checkpoint_path runs/tracerl-0 \
    --dataset gsm8k --output_dir results --suffix tracerl-0
python -m d1 parse results    # --compare A B gives the difference of two files, paired by problem
```

"""
SEARCH = """Per setup: the rate and number of updates that were chosen on validation problems, and the percentage of
these that the models solved then (mean of two seeds, at the smaller budget). A choice among several looks better than
it is."""
CANDIDATE = """The best row of the search with one change each, then the best of these with one more, on three setups.
The row with the highest mean is the candidate."""
DUELS = """Differences to every published method in every setup and at both budgets, on the seeds that both have. Holm's
p-values are over all of them. A candidate tops the board if each difference is above 0 with a p-value below 0.05."""
WAY = """Sudoku from SFT at the smaller budget. d1 gets one idea of the search's best row at a time, then the first two,
three and so on; each row is tuned like a method. [variants.py](../studies/leaderboard/variants.py) says which settings
an idea has."""
SCALE = """Sudoku from SFT at the smaller budget, a model of 2.1 million parameters: d1 and the five best rows of the
search on the small model, tuned anew, with four seeds."""
