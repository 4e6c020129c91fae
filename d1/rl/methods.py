"""The published RL methods, as settings of the trainer. A method is an entry here, with a few choices:

- `estimator`: which views of a completion are scored, with which weights (`d1/scoring/estimators.py`);
- `scored_tokens`: which of its tokens count in the loss (`d1/rl/batch.py`);
- `objective` and its `loss_type`, the divisor (`d1/rl/losses.py`; `trl` is TRL's own loss);
- `kl`: the penalty that `beta` weighs (`d1/rl/losses.py`);
- `advantage`: how TRL's advantages are changed (`d1/rl/losses.py`);
- the number of updates per rollout, and the sampling temperature.

`--method NAME` sets all values of the entry. A new method needs an entry here, its formula in
`tests/d1/rl/test_published.py` and a row of `docs/methods.md`. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from d1.sampling.settings import BLOCK_LENGTH, default_steps


@dataclass(frozen=True)
class Trained:
    """Which weights a method's authors trained, and on how many prompts per optimizer step; a learning rate belongs to
    both. The completions per prompt are the entry's `num_generations`."""

    prompts: int
    lora_r: int = 0  # rank of the adapter; 0: all weights
    in_4bit: bool = False  # the frozen weights below the adapter are in NF4

    @property
    def weights(self) -> str:
        """The trained weights in words."""
        if not self.lora_r:
            return "all weights"
        return f"LoRA {self.lora_r}{' on 4 bits' if self.in_4bit else ''}"


@dataclass(frozen=True)
class Method:
    """An entry of the table.

    Attributes:
        paper: the method's name and where it is published.
        values: the settings that define the method. With `--method` on the command line they override a config file.
        scale: the settings of its authors' run that depend on the model and its size: optimizer, schedule, group and
            canvas. A config file overrides them.
        trained: what its authors trained; None for a method of this library or of a user. It sets nothing, because
            memory decides it: `d1 rl` says where a run differs.
    """

    paper: str
    values: dict[str, Any]
    scale: dict[str, Any] = field(default_factory=dict)
    trained: Trained | None = None

    def deviation(self, run: Trained, num_generations: int, learning_rate: float) -> str:
        """What a run with these weights, prompts and completions per prompt does instead of the authors' run, as a
        sentence; "" if nothing differs or the authors' run is not known."""
        own, group = self.trained, self.scale.get("num_generations")
        if own is None or (own == run and group == num_generations):
            return ""
        text = (
            f"its authors trained {own.weights} with {own.prompts} prompts x {group} completions per optimizer step; "
            f"this run trains {run.weights} with {run.prompts:g} x {num_generations}"
        )
        if (own.lora_r > 0) != (run.lora_r > 0) and learning_rate == self.scale.get("learning_rate"):
            text += f", and --learning_rate {learning_rate:g} is the authors' for {own.weights}"
        return text

    def under(self, given: dict[str, Any]) -> dict[str, Any]:
        """The method's settings: `given` overrides `scale`, and `values` override `given`. The canvas is one setting,
        because its length, steps and blocks must fit each other: if one of them is given, the others are d1's, with
        steps by the length. So is a schedule: another one has no warm-up and no arguments, unless they are given."""
        canvas = canvas_of(given) if CANVAS.keys() & given.keys() else {}
        schedule = PLAIN if SCHEDULE in given else {}
        return {**self.scale, **canvas, **schedule, **given, **self.values}


SCHEDULE, PLAIN = "lr_scheduler_type", {"warmup_steps": 0, "lr_scheduler_kwargs": None}
# d1, dllm-reasoning/d1@837888f diffu-grpo: slurm_scripts/train.yaml; block_length is 32 there
CANVAS = {"max_completion_length": 256, "diffusion_steps": 128, "block_length": None}


def canvas_of(given: dict[str, Any]) -> dict[str, Any]:
    """d1's canvas for a run in which some of its settings are given; the steps are those of the given length."""
    length = given.get("max_completion_length") or CANVAS["max_completion_length"]
    block, steps = given.get("block_length") or BLOCK_LENGTH, CANVAS["diffusion_steps"]
    if isinstance(length, int) and isinstance(block, int) and length > 0 and block > 0:  # ranges are checked later
        steps = default_steps(length, block)
    return {**CANVAS, "max_completion_length": None, "diffusion_steps": steps}


# d1's values are the defaults. Every entry starts from them, so that no value of a method chosen before is kept.
D1: dict[str, Any] = {
    "estimator": "one_step",  # paper, section 3: one view in which the whole canvas is hidden
    "p_mask_prompt": 0.15,  # train.yaml
    "scored_tokens": "ended",
    "score_as_sampled": False,
    "objective": "trl",  # -min(rho A, clip(rho) A) with rho = exp(l - old) of each token
    "loss_type": "bnpo",  # diffu_grpo_trainer.py: the mean over the tokens of a micro-batch
    "importance_sampling_level": "token",
    "epsilon": 0.5,  # train.yaml
    "kl": "k3",  # to the reference, per token
    "beta": 0.04,  # train.yaml
    "advantage": "trl",
    "scale_rewards": "none",  # A = r - m, where m is the group's mean
    "num_iterations": 12,  # train.yaml [8 on Countdown and Sudoku]
    "split_views": False,
    "temperature": 0.9,  # the default of diffu_grpo_config.py
    "top_k": 0,
    "top_p": 1.0,
    "remasking": "low_confidence",
    "max_grad_norm": 0.2,  # train.yaml
}
D1_OPTIMIZER: dict[str, Any] = {  # train.yaml
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 0.0001,  # a share of all steps
    "weight_decay": 0.1,
    "adam_beta2": 0.99,
}


def method(paper: str, scale: dict[str, Any], trained: Trained | None = None, **values: Any) -> Method:
    """An entry: d1's values and optimizer, except for what is given here."""
    return Method(paper, D1 | values, D1_OPTIMIZER | scale, trained)


def canvas(tokens: int, steps: int, block: int) -> dict[str, int]:
    return {"max_completion_length": tokens, "diffusion_steps": steps, "block_length": block}


# d1, train.yaml: NF4; 8 GPUs x 6 completions x accumulation 2 = 16 prompts x 6
D1_TRAINED = Trained(16, lora_r=128, in_4bit=True)
# DARE: all weights; train_batch_size 16
DARE_TRAINED = Trained(16)

# --- Values that several entries share --------------------------------------------------------------------------------

# A constant rate, with the optimizer's own defaults
CONSTANT: dict[str, Any] = dict(lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_beta2=0.999)
# For entries of this library: the Trainer's defaults
LINEAR: dict[str, Any] = CONSTANT | dict(lr_scheduler_type="linear")
# One token at least in each step, as many as have more than this probability: Fast-dLLM's rule
THRESHOLD: dict[str, Any] = dict(sampler="parallel", reveal="threshold", diffusion_steps=None)

# AGRPO, probablyabot/agrpo@98f1182: train.yaml, agrpo_trainer.py
AGRPO: dict[str, Any] = dict(
    estimator="replay",
    p_mask_prompt=0.0,
    scored_tokens="steps",  # last_step: up to the last step with a token other than EOS, also after the first EOS
    score_as_sampled=True,  # temperature, top-k and top-p of the rollout also apply to scoring
    objective="clipped_views",
    loss_type="sum",  # sum / (mc_samples x num_generations): a sum over tokens, the mean over rows
    epsilon=0.2,
    beta=0.0,
    num_iterations=1,
    temperature=0.6,
    top_k=150,
    top_p=0.99,
    remasking="random",
    max_grad_norm=1.0,
    num_views=24,  # mc_samples; low_discrepancy: random numbers are spread evenly over all draws
    mean_step=True,  # weight 1 / n, or 1 / (S n p_s) of a step s drawn with probability p_s among S steps
)
AGRPO_SCALE = dict(  # train.yaml
    learning_rate=5e-06,
    num_generations=8,
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    warmup_steps=0.01,
    **canvas(tokens=384, steps=128, block=12),
)

AGRPO_TRAINED = Trained(16, lora_r=64)  # train.yaml: 8 GPUs x 8 x accumulation 2

# TraceRL, Gen-Verse/dLLM-RL@10b4fd1: configs/rl_llada.yaml, train/rl_llada.py, reward/rl_reward.py
TRACERL: dict[str, Any] = dict(
    p_mask_prompt=0.0,
    scored_tokens="text",  # post_num 0: <|endoftext|> is not scored, <|eot_id|> is
    objective="clipped_views",
    loss_type="views",  # the mean over a view's tokens, then over views
    epsilon=0.2,  # eps
    kl="k3_to_old",  # use_kl_estimator_k3: summed over a view's tokens, averaged over views
    beta=0.01,
    advantage="standardised",  # (r - m) / s, where s divides by n
    num_iterations=4,  # optimizer steps per rollout; in the release, one per 256 views (2 x 128)
    split_views=True,  # each view is used once
    max_grad_norm=1.0,
)
RIGHT_SHARE = [0.2, 0.8]  # rl_reward.py: prompts with fewer or more correct completions are dropped
# rl_llada.yaml: num_response_per_task 8; its cosine with min_lr_scale 1.0 is constant
TRACERL_SCALE = dict(learning_rate=1e-06, num_generations=8, **CONSTANT)
TRACERL_TRAINED = Trained(32)  # num_task_per_step

# EGSPO, vishnutez/egspo-dllm-rl@a7d618b egspo: slurm_scripts/train.yaml, train.sh
EGSPO: dict[str, Any] = dict(
    estimator="replay",
    p_mask_prompt=0.0,
    scored_tokens="canvas",
    objective="clipped_steps",  # one ratio per step, of the product of its tokens' probabilities
    loss_type="views",
    epsilon=0.2,  # train.sh EPSILON
    kl="k3_steps",
    beta=0.04,  # train.yaml
    num_iterations=4,  # egspo_trainer.py: 4 optimizer steps per rollout, each on 2 of the 8 states
    split_views=True,
    num_views=8,  # train.yaml logps_eval_num_steps
    draw_steps="top",  # logps_eval_time_steps_mode high_entropy: unweighted, so biased by design
    epsilon_high=0.5,  # train.sh EPSILON_HIGH
)
EGSPO_SCALE = dict(learning_rate=3e-05, num_generations=8)  # train.yaml, train.sh
EGSPO_TRAINED = Trained(12, lora_r=128, in_4bit=True)  # 4 nodes x 2 GPUs x 6 x accumulation 2

# DARE, yjyddq/DARE@83ae8a3: recipe/llada/run_*.sh
DARE: dict[str, Any] = dict(
    p_mask_prompt=0.0,
    epsilon=0.2,
    beta=0.0,
    scale_rewards="group",  # z
    num_iterations=1,
    temperature=0.6,  # [1.0 in the Math-Hard recipes]
    max_grad_norm=1.0,
)
DARE_SCALE = dict(learning_rate=5e-07, num_generations=8, **CONSTANT | dict(weight_decay=0.01))

# ESPO and GDSD: recipes/run_gsm8k_llada.sh, scripts/train_gdsd.yaml
ESPO_OPTIMIZER: dict[str, Any] = dict(weight_decay=0.01, warmup_steps=0.001)

# JustGRPO for blocks, NVIDIA-NeMo/RL@749b0ed
JUST_GRPO_BLOCKS: dict[str, Any] = dict(
    estimator="left_to_right",  # view k hides the tokens from place k on in each block, and scores that at k
    p_mask_prompt=0.0,
    objective="clipped_views",
    loss_type="scored",  # token_level_loss: the sum over selected tokens / their number
    epsilon=0.2,  # ratio_clip_min and max
    beta=0.01,  # reference_policy_kl_penalty, k3
    advantage="leave_one_out",  # use_leave_one_out_baseline; normalize_rewards is off
    num_iterations=1,
    temperature=1.0,
    remasking="leftmost",  # selection_policy
    diffusion_steps=None,  # max_steps: one per token
    first_token="masked",  # blocks begin fully masked
    sampling_weight_cap=2.0,  # truncated_importance_sampling_ratio
    max_grad_norm=1.0,
)
JUST_GRPO_BLOCKS_SCALE: dict[str, Any] = dict(
    learning_rate=3e-07,
    num_generations=8,
    weight_decay=0.01,
    adam_beta2=0.999,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=13,
    max_completion_length=512,
    block_length=16,
)

# --- The table --------------------------------------------------------------------------------------------------------
#
# Above an entry: its released code, and what differs from it on purpose. After a value: its source, or what it means;
# values for other tasks in brackets. A: advantage. G: tokens of the canvas. L: scored tokens of a completion. l: a
# log-probability. n: num_views. old, ref: l of the policy that sampled, and of the reference. r: reward. s: the
# standard deviation of a group's rewards. z: (r - m) / (s + 1e-4). "d1's" is a value of D1 or of d1's train.yaml.
#
# With one optimizer step per rollout every ratio is 1, and clips, ratio caps and penalties to the old policy do
# nothing: agrpo, agrpo-entropy, cj-grpo, just-grpo, bgpo, dipo, ebpo, trajectory.
#
# Divisors count over the whole rollout, on all processes, where releases count per micro-batch; except for `bnpo`
# (d1, coupled-grpo, d2) and rldf, which count per micro-batch here, too.

METHODS: dict[str, Method] = {
    # The prompt mask of a row depends on the update, not on the micro-step. All differences: docs/differences.md
    "d1": method(  # train.yaml
        "d1, arXiv 2504.12216", scale=dict(learning_rate=3e-06, num_generations=6), trained=D1_TRAINED
    ),
    # xiaohangt/wd1@0898985 wd1: train.yaml, trainers/rev_grpo_trainer.py, run/wll_NP_*.sh
    # The softmax is over the group; in the release, over the rows of a device.
    "wd1": method(
        "wd1, arXiv 2507.08838",
        trained=Trained(8, lora_r=128, in_4bit=True),  # d1's on 4 GPUs: run/wll_NP_gsm8k.sh
        objective="reinforce",  # section 3: no ratio, no clip, no KL
        loss_type="sum",
        beta=0.0,
        advantage="signed_softmax",  # section 3: softmax(A) - softmax(-A)
        scale=dict(learning_rate=3e-06, num_generations=6),  # train.yaml; mu 12 of d1 is NUM_ITER [8 on Sudoku]
    ),
    # apple/ml-diffucoder@f735e01: recipes/config_coupled_code.yaml, src/open_r1/coupled_grpo.py
    # Tokens after the EOS are hidden. The reference is not updated: sync_ref_model with 64 steps and .6 does it.
    "coupled-grpo": method(
        "DiffuCoder, arXiv 2506.20639",
        trained=Trained(8),  # 8 GPUs x 5 x accumulation 2, groups of 10
        estimator="coupled",  # all hidden; each token hidden with rho in [.2, .8], per row; its complement
        p_mask_prompt=0.0,
        beta=0.01,
        advantage="leave_one_out",
        num_iterations=2,
        temperature=1.0,  # generation_temperature
        top_p=0.95,  # sampling only
        remasking="entropy",  # tokens of lowest entropy first
        scale=dict(
            learning_rate=1e-06,
            num_generations=10,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            **canvas(tokens=256, steps=256, block=256),  # one block
        ),
    ),
    # ML-GSAI/ESPO@b5f2dac: recipes/train.yaml, recipes/run_gsm8k_llada.sh, espo/espo_trainer.py
    # The counts x of hidden tokens are spread evenly over all rows of the rollout.
    "espo": method(
        "ESPO, arXiv 2512.03759",
        trained=Trained(16, lora_r=128),  # in bf16; 8 GPUs x 3 x accumulation 4
        estimator="espo",  # x uniform on 0..G hidden, weight (G + 1) / (2 n x), and the complement
        p_mask_prompt=0.0,
        scored_tokens="canvas",
        loss_type="grpo",
        importance_sampling_level="sequence",  # exp((ELBO - old) / G)
        epsilon=0.2,  # train.yaml [0 on Countdown]
        kl="k2_sequence",  # (ELBO - ref)^2 / (2 G)
        beta=0.001,  # run_gsm8k_llada.sh [.003 on Countdown, .01 on Sudoku]
        advantage="leave_one_out",
        num_iterations=8,  # run_gsm8k_llada.sh NUM_ITER
        temperature=1.0,  # train.yaml generation_temperature
        num_views=2,  # run_gsm8k_llada.sh num_mc
        antithetic=True,  # train.yaml reduce_var
        stratified=True,
        # run_gsm8k_llada.sh [128 steps on Countdown and Sudoku]
        scale=dict(learning_rate=3e-06, num_generations=6, **ESPO_OPTIMIZER, **canvas(tokens=256, steps=256, block=32)),
    ),
    # facebookresearch/SPG@a1c7120 spg: slurm_scripts/spg_mix/gsm_base_spg_mix_beta1.5_weight0.5.sbatch, spg_trainer.py
    # Divided by the tokens of the rollout, not of the micro-batch.
    "spg": method(
        "SPG, arXiv 2510.09541",
        trained=D1_TRAINED,
        estimator="spg",  # forward_type block_random; prompt masks are d1's
        objective="spg",  # section 3: the lower form for A > 0, else a mixture of both
        loss_type="dapo",  # -A x bound x L / (sum of L); no clip, so epsilon is not read
        beta=0.0,
        num_iterations=4,  # NUM_ITER
        num_views=2,  # num_t
        eubo_beta=1.5,  # [1.0 on Sudoku]
        eubo_share=0.5,  # mix_weight; the temperature is d1's [.3 on Sudoku]
        scale=dict(learning_rate=3e-06, num_generations=6),
    ),
    # One rollout per optimizer step, not per micro-batch. The release fails on a completion of EOS alone.
    "agrpo": method(
        "AGRPO, arXiv 2510.04019, steps drawn uniformly",
        AGRPO_SCALE,
        AGRPO_TRAINED,
        **AGRPO,
        draw_steps="uniform",
    ),
    # train.yaml unchanged, importance_sampling entropy; entropies are at temperature 1
    "agrpo-entropy": method(
        "AGRPO, arXiv 2510.04019, steps drawn by entropy, as released",
        AGRPO_SCALE,
        AGRPO_TRAINED,
        **AGRPO,
        draw_steps="entropy",
    ),
    # DARE: verl/workers/actor/llada_dp_actor_cj_grpo.py. Exact sampler; z adds 1e-4, not 1e-6, to s.
    # The authors' first code (yjyddq/EOSER-ASS-RL) has clip .5, beta .04 for k3, A = r - m, T 1 and mu 12 [8].
    "cj-grpo": method(
        "CJ-GRPO, arXiv 2509.23924, as in DARE",
        trained=DARE_TRAINED,
        **DARE,
        estimator="replay",  # every step
        scored_tokens="canvas",
        objective="clipped_views",
        loss_type="views",  # the mean over a step's tokens, then over steps
        delta=3.0,  # a second clip for A < 0
        scale=dict(**DARE_SCALE, **canvas(tokens=256, steps=128, block=32)),
    ),
    # kuleshov-group/d2@381b9f1 diffu-grpo: bash_scripts/sudoku_d2stepmerge_N16.sh, train.yaml, diffu_grpo_trainer.py
    # One micro-batch scores all segments of its rows.
    "d2": method(
        "d2-StepMerge, arXiv 2509.21474",
        trained=D1_TRAINED,  # accumulation 32, of which 16 are the segments of the same rows
        estimator="segments",  # all of them in every update, each in the state at its beginning
        objective="clipped_views",  # clip, beta and prompt masks are d1's: train.yaml
        num_iterations=8,  # NUM_ITER [12 on GSM8K]
        temperature=0.3,  # [.9 on GSM8K]
        segments=16,  # N [8 on GSM8K]
        # sudoku_d2stepmerge_N16.sh [256 tokens and 128 steps on GSM8K]
        scale=dict(learning_rate=3e-06, num_generations=6, **canvas(tokens=128, steps=64, block=32)),
    ),
    # Views are divided among updates at random; one optimizer for the run. Left out: the value model, and the rule that
    # a completion within 5 tokens of the limit is wrong.
    "tracerl": method(
        "TraceRL, arXiv 2509.06949",
        trained=TRACERL_TRAINED,
        **TRACERL,
        estimator="replay",
        temperature=0.8,  # rl_llada.yaml
        segment_steps=8,  # shrink
        right_share=RIGHT_SHARE,
        scale=dict(**TRACERL_SCALE, **canvas(tokens=512, steps=512, block=32)),
    ),
    # LeapLabTHU/JustGRPO@eebe50e: train.py, grpo.py
    # The mean, not the sum, over accumulated micro-batches; rows with A = 0 are counted over the rollout.
    "just-grpo": method(
        "JustGRPO, arXiv 2601.15165",
        trained=Trained(64),
        estimator="left_to_right",  # grpo.py: one view per token of the canvas, the chain rule
        p_mask_prompt=0.0,
        scored_tokens="canvas",
        objective="clipped_views",
        loss_type="active",  # gain / gen_length / (valid_samples + 1e-5): by G and the rows with A other than 0
        epsilon=0.2,  # eps
        beta=0.0,
        scale_rewards="group",  # z
        num_iterations=1,
        temperature=1.0,
        max_grad_norm=1.0,
        block_length=1,
        diffusion_steps=None,  # one per token
        scale=dict(learning_rate=5e-06, num_generations=16, **CONSTANT),  # 8 x repeat_times 2
    ),
    # NVIDIA-NeMo/RL@749b0ed research/just_grpo, for Nemotron-Labs-Diffusion-3B:
    # just_grpo-sudoku6x6-4n8g-megatron-inference-long.yaml, grpo_math_1B.yaml. There, mask tokens before the prompt
    # fill its last block, and are seen; here blocks begin at the prompt's end.
    "just-grpo-blocks": method(
        "JustGRPO for models with blocks, as in NeMo-RL",
        trained=Trained(128),  # num_prompts_per_step
        **JUST_GRPO_BLOCKS,
        scale=JUST_GRPO_BLOCKS_SCALE,
    ),
    # The same, inference-fast-long.yaml: training_token_fraction .25 of 16 tokens
    "just-grpo-fast": method(
        "JustGRPO for models with blocks, the least likely quarter of the tokens, as in NeMo-RL",
        trained=Trained(128),
        **JUST_GRPO_BLOCKS,
        num_views=4,
        scale=JUST_GRPO_BLOCKS_SCALE,
    ),
    # TraceRL's code with method random_masking, which MMaDA names as the implementation
    "unigrpo": method(
        "UniGRPO, of MMaDA, arXiv 2505.15809",
        trained=TRACERL_TRAINED,
        **TRACERL,
        estimator="random_masks",  # lower_p .1, upper_p .9: t uniform in (.1, .9) per view
        temperature=0.8,
        num_views=35,  # mask_times_per_sample
        right_share=RIGHT_SHARE,
        scale=dict(**TRACERL_SCALE, **canvas(tokens=512, steps=512, block=32)),
    ),
    # DARE: verl/trainer/ppo/dllm_core_algos.py, run_bgpo_*.sh. z as in cj-grpo; the mean is over rows.
    "bgpo": method(
        "BGPO, arXiv 2510.11683, as in DARE",
        trained=DARE_TRAINED,
        **DARE,
        estimator="counts",  # exactly x hidden tokens, weight G / x
        scored_tokens="canvas",
        objective="bgpo",  # section 3: 1 + d for A > 0, else exp(d); the release's log(1 + d) is NaN for d < -1
        loss_type="sum",
        num_views=16,
        stratified=True,  # x spread evenly over 1..G
        delta=3.0,  # a second clip for A < 0
        scale=dict(**DARE_SCALE, **canvas(tokens=512, steps=256, block=32)),
    ),
    # JianyuanZhong/StableDRL@26ad014: configs/*_spg_snis.yaml, networks/llada_svpo.py. For full fine-tuning.
    # Old and new bounds share their masks; in the release they do not, so its weights are mask noise.
    "stable-drl": method(
        "StableDRL, arXiv 2603.06743",
        trained=Trained(32),
        estimator="spg",  # p_mask_perturb .15 is d1's prompt mask
        objective="stable_drl",  # w = softmax over a prompt's completions of min(bound - old bound, log ratio_cap)
        loss_type="sum",
        beta=0.0,
        num_iterations=2,
        num_views=2,  # num_mc_samples
        ratio_cap=5.0,  # ais_clip_iw
        eubo_beta=1.5,  # spg_beta
        eubo_share=0.5,  # spg_omega
        # The rate: [2e-6 on GSM8K and MATH], linear_decay, to 0; 16: 8 x repeat_times 2
        scale=dict(learning_rate=1e-06, num_generations=16, lr_scheduler_type="linear", warmup_steps=0),
    ),
    # States are divided among updates at random, not by rank.
    "egspo": method("EGSPO, arXiv 2603.12554", EGSPO_SCALE, EGSPO_TRAINED, **EGSPO),
    # train.sh LAMBDA1 and NORMALIZE_RETURNS: A = [r + lam (r - r_s)] / (1 + lam) minus its mean over the group; r_s is
    # the reward if the model finishes state s greedily in one pass
    "egspo-sa": method(
        "EGSPO with stepwise advantages, arXiv 2603.12554", EGSPO_SCALE, EGSPO_TRAINED, **EGSPO, state_reward=0.5
    ),
    # KevinRojas1499/GDPO: gdpo_trainer.py, likelihood_estimators.py; its values are those of the port by one of its
    # authors, NVIDIA-NeMo/RL, pull request 3550, research/gdpo/configs/gdpo_llada_8b.yaml, which scores up to the EOS.
    # In the release, old log-probs are scored under other masks than new ones (29 % of the masks differ), so that a
    # ratio has noise even before the first update. Here new and old share the masks, and the first ratio is 1.
    "gdpo": method(
        "GDPO, arXiv 2510.08554",
        trained=Trained(32, lora_r=128),  # num_prompts_per_step
        estimator="gauss",  # gauss-3: floor(t G) hidden tokens (here at least one), weight w / t
        p_mask_prompt=0.0,
        scored_tokens="canvas",
        loss_type="grpo",
        importance_sampling_level="sequence",  # exp((ELBO - old) / G); ratio_clip_min and _max .5 and mu 12 are d1's
        beta=0.0,
        scale=dict(learning_rate=3e-07, num_generations=6),
    ),
    # GaryBall/GDSD@3fb6780: scripts/train_gdsd.yaml, run_gdsd_llada_gsm8k.sh, gdsd_trainer_batchll.py
    # Counts are spread over all rows of the rollout.
    "gdsd": method(
        "GDSD, arXiv 2605.29398, as its code is written",
        trained=Trained(20, lora_r=128),  # in bf16; 8 GPUs x 10 x accumulation 4
        estimator="complements",  # a mask over the canvas and its complement, the mean of both
        p_mask_prompt=0.0,
        scored_tokens="canvas",
        objective="gdsd",  # (clamp(l - old, log(1 +- epsilon)) / G - 10 A)^2; PSI=10.0
        loss_type="sum",  # over draws
        epsilon=4e-4,  # train_gdsd.yaml: six orders of magnitude below the target
        kl="k2_draws",
        beta=0.001,  # BETA_KL_DIV
        advantage="leave_one_out",
        num_iterations=8,
        temperature=1.0,
        num_views=2,  # SAMPLE_STEPS
        stratified=True,
        # 16: WORLD_SIZE * 2 on 8 GPUs
        scale=dict(
            learning_rate=3e-06, num_generations=16, **ESPO_OPTIMIZER, **canvas(tokens=256, steps=256, block=32)
        ),
    ),
    # ant-research/Drift@7abd99b: configs/llada_math.yaml, trainer/main_rl.py, masking_strategy.py, rollout_utils.py
    # 4 of the 8 prompts of all processes, not of each; a completion of a single step counts. The cache keeps the
    # whole rest of the canvas, the release 128 tokens of it (further_horizon).
    "rldf": method(
        "RLDF, arXiv 2605.25638, of ant-research/Drift",
        trained=Trained(8),  # rollout.batch_size
        **THRESHOLD | dict(sampler="cached+parallel"),  # use_cache, remasking_strategy low_confidence_dynamic
        estimator="states",  # sequential_masking, sample_temperature 1: p ~ exp(mean surprisal), without replacement
        p_mask_prompt=0.0,
        scored_tokens="unpadded",  # completion_mask
        objective="rldf",  # -A l of tokens revealed there, and of hidden ones with p >= low_prob_threshold .6
        loss_type="sum",
        epsilon=0.2,  # not read: there is no ratio
        kl="k3_likely",  # kl_type k3
        beta=0.01,
        advantage="floored",  # (r - m) / max(s, .01)
        prompt_share=0.5,  # batch_size_lm 4 of rollout.batch_size 8
        num_iterations=1,
        temperature=1.0,
        max_grad_norm=1.0,  # accelerate_configs/dp_zero3.json
        num_views=4,  # mask_num
        kv_cache="prefix",
        reveal_level=0.9,  # dynamic_threshold
        scale=dict(learning_rate=1e-06, num_generations=4, max_completion_length=256, block_length=32, **CONSTANT),
    ),
    # OpenMOSS/DiRL@ec4bfb3: configs/rl.yaml, scripts/dapo.sh, train/dapo.py; clip as in modeling_sdar.py
    # The canvas is as configured, not 8192 tokens. Dropped prompts are replaced in at most 12 rounds of a rollout each;
    # the release has rounds of three times this size, and no limit. It samples at least 128 tokens, and takes rows in
    # the order of their file (--shuffle_dataset false).
    "dipo": method(
        "DiPO, of DiRL, for block-causal models",
        trained=Trained(128),  # num_task_per_step
        **THRESHOLD,  # REMASKING_STRATEGY low_confidence_dynamic, as many DENOISING_STEPS_PER_BLOCK as tokens
        estimator="replay",  # every step: one view holds the k-th step of every block
        p_mask_prompt=0.0,
        objective="clipped_views",
        # Of a device: every round of a completion repeats its labels, and the sum over rounds is divided by the block.
        loss_type="rounds",  # the sum / (sum over completions of L times its rounds, / block); rounds: its views
        epsilon=0.2,
        beta=0.0,  # KL
        advantage="standardised",
        num_iterations=1,  # ITERATIONS
        temperature=1.0,
        top_k=50,
        max_grad_norm=1.0,
        epsilon_high=0.28,
        right_share=[1e-6, 1 - 1e-6],  # prompts with only correct or only wrong completions are dropped
        refills=12,
        reveal_level=0.9,  # DYNAMIC_THRESHOLD
        scale=dict(learning_rate=1e-06, num_generations=8, **CONSTANT | dict(lr_scheduler_type="constant_with_warmup")),
    ),
    # DARE: verl/trainer/ppo/dllm_core_algos.py, for LLaDA2.1 (arXiv 2602.08676). z as in cj-grpo; the grids of hidden
    # shares of all rows are interleaved.
    "ebpo": method(
        "EBPO, of LLaDA2.1, for block-causal models, as in DARE",
        trained=DARE_TRAINED,
        **DARE,
        **THRESHOLD,  # SGLang's LowConfidence
        estimator="counts",  # exactly x hidden tokens per block of length len, weight len / x
        objective="clipped_sequences",  # exp(ELBO - old), not divided by the length
        loss_type="sum",
        num_views=16,
        stratified=True,  # the shares x / len, over all draws and blocks
        reveal_level=0.95,  # recipe/llada2_mini/sglang_low_confidence_llada2.yaml, recipe/sdar/..._sdar.yaml
        scale=DARE_SCALE,
    ),
    # This library's own: the weights S / n and 1 / (n p_s) are unbiased for the sum over S steps; the released ones
    # give 1 / S of it (tests/d1/scoring/test_replay.py enumerates both).
    "trajectory": method(
        "the sum over a trajectory's steps; AGRPO, arXiv 2510.04019, takes their mean",
        estimator="replay",
        p_mask_prompt=0.0,
        objective="clipped_views",
        loss_type="sum",
        epsilon=0.2,
        beta=0.0,
        num_iterations=1,
        num_views=24,
        draw_steps="entropy",
        scale=dict(learning_rate=5e-06, num_generations=8, **LINEAR),
    ),
    # TraceRL with the threshold rollouts of its SDAR config, at temperature 1; a name kept from studies/leaderboard
    "quick-replay": method(
        "TraceRL, arXiv 2509.06949, with the threshold rollouts of its SDAR config",
        **TRACERL,
        estimator="replay",
        temperature=1.0,  # rldf
        segment_steps=8,  # tracerl
        num_views=4,  # of the merged steps; unbiased for the sum over all
        right_share=RIGHT_SHARE,
        sampler="parallel",  # rldf
        reveal="threshold",
        reveal_level=0.9,
        scale=dict(**TRACERL_SCALE, **canvas(tokens=256, steps=256, block=32)),
    ),
    # A reference method: -A ELBO / L, without ratio, clip or KL. LLaDA's bound, arXiv 2502.09992
    "reinforce": method(
        "the policy gradient of LLaDA's bound, Williams 1992, arXiv 2502.09992",
        estimator="elbo",
        p_mask_prompt=0.0,
        objective="reinforce",
        loss_type="grpo",
        epsilon=0.2,  # not read: there is no ratio
        beta=0.0,
        num_iterations=1,
        num_views=4,  # with their complements, at stratified times
        antithetic=True,
        stratified=True,
        scale=LINEAR,
    ),
}
