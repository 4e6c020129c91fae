"""The settings of a rollout, which only this module names and checks, and the flags that choose them.

Imports no torch.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import MISSING, dataclass, fields, replace
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from d1.models.distribution import MODEL_DISTRIBUTION, Distribution, linear_temperature
from d1.models.kinds import attention_name, block_size, has_masks, is_encoder, vocabulary, windowed
from d1.ranges import AMOUNT, BELOW_ONE, COUNT, NATURAL, POSITIVE, SEED, Range, nearest, ranges_of, setting
from d1.sampling.caches import CACHES
from d1.sampling.reveal import REMASKING, RULES, block_schedule, reveal_schedule

if TYPE_CHECKING:
    from d1.models.folder import ModelFolder

BLOCK_LENGTH = 32  # d1's
GEN_LENGTH = 128  # the shortest canvas of d1's evaluation
TOKENS_PER_STEP = 2  # d1's
MIN_BLOCK = 8  # tokens of a block that nobody chose, unless the canvas is shorter
SAMPLERS = ("exact", "cached", "parallel", "cached+parallel", "scdd")
FIRST_TOKENS = ("causal", "masked")
POST_STEPS = 16  # LLaDA2.1's
POST_STEPS_RANGE = Range(0, 256, integer=True)
# LLaDA2.1's (arXiv 2602.08676): the level of the rule "threshold", and `edit_threshold`
EDITING: dict[str, tuple[float, float]] = {"quality": (0.7, 0.5), "speed": (0.5, 0.0)}
OUTPUTS = ("argmax", "draw")
NUCLEUS_P = 0.9  # SCDD's
STOP_ENTROPY = 0.005  # DiffusionGemma's
# Of numbers that are not counts, unless they are 0. Logits over a smaller temperature, or their gradients, overflow in
# 32 bits; a smaller level is 0 there; larger numbers overflow or change nothing.
SMALLEST, LARGEST = 1e-6, 1e4
# Of models with uniform noise alone, with the values that mean "unset"
UNIFORM_NOISE_DEFAULTS = {"end_temperature": None, "self_conditioning": True, "output": "argmax", "stop_entropy": None}


def default_steps(
    gen_length: int, block_length: int, causal_first: bool = False, tokens_per_step: int = TOKENS_PER_STEP
) -> int:
    """Forward passes of a completion where no number is given: one per two tokens, as in d1's runs, and at least as
    many as its blocks need. This is the rule of every command that samples.

    Args:
        causal_first: the first token of a block takes a step of its own (`first_token`).
        tokens_per_step: 1 where each token has a step of its own.
    """
    blocks = -(-gen_length // block_length)
    needed = min(2 * blocks, gen_length) if causal_first else blocks
    return max(gen_length // tokens_per_step, needed)


def equal_blocks(gen_length: int) -> int:
    """Tokens per block where no number is given and all blocks must be equal: the largest divisor of the canvas up to
    `BLOCK_LENGTH`. ValueError if it is below `MIN_BLOCK`, because blocks so small need many steps."""
    size = min(BLOCK_LENGTH, gen_length)
    while gen_length % size:
        size -= 1
    if size < min(MIN_BLOCK, gen_length):
        raise ValueError(
            f"max_completion_length {gen_length} has no equal blocks of {MIN_BLOCK} to {BLOCK_LENGTH} tokens: choose "
            f"a multiple of {MIN_BLOCK}, or set block_length"
        )
    return size


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are sampled.

    Raises:
        ValueError: a setting is wrong, contradicts another, or would be ignored.
    """

    # Blocks and steps that do not divide `gen_length` are spread evenly; one block of all tokens is pure diffusion.
    gen_length: Annotated[int, COUNT] = setting(help="tokens per completion")
    block_length: Annotated[int, COUNT] = setting(
        help=f"tokens per block; blocks are filled left to right (default: the model's own, or {BLOCK_LENGTH})"
    )
    # Guidance doubles the sequences per pass; a parallel sampler takes fewer passes.
    steps: Annotated[int, COUNT] = setting(help="forward passes per completion (default: half of gen_length)")
    temperature: Annotated[float, AMOUNT] = setting(0.0, "sampling temperature; 0, the default, is greedy")
    cfg_scale: Annotated[float, AMOUNT] = setting(0.0, "classifier-free guidance; 0, the default, is off")
    remasking: str = setting("low_confidence", "which tokens are revealed first", choices=REMASKING)
    # "exact" is the published algorithm; "cached" reads keys and values from a cache, "parallel" reveals as many tokens
    # as a rule allows. A block-causal model's own cache costs no accuracy, and every sampler uses it. "scdd" is that of
    # models which SFT with `--noise scdd` trained (`scdd.py`).
    sampler: str = setting("exact", "all but exact trade accuracy for speed", choices=SAMPLERS)
    kv_cache: str | None = setting(None, "cache of a cached sampler (default: dual)", choices=CACHES)
    reveal: str | None = setting(None, "reveal rule of a parallel sampler (default: threshold)", choices=RULES)
    reveal_level: Annotated[float | None, AMOUNT | None] = setting(
        None, f"level of the rule (default: {', '.join(f'{name} {rule.level}' for name, rule in RULES.items())})"
    )
    edit_threshold: Annotated[float | None, BELOW_ONE | None] = setting(
        None,
        "with a parallel sampler, replace a revealed token of the block where another is predicted with more than this "
        "probability; 0: with any (default: revealed tokens stay)",
    )
    max_post_steps: Annotated[int | None, POST_STEPS_RANGE | None] = setting(
        None, f"with editing, passes per block after its last mask, at most (default: {POST_STEPS})"
    )
    editing: str | None = setting(
        None, "LLaDA2.1's levels of reveal and edit_threshold (default: no editing)", choices=EDITING
    )
    first_token: str | None = setting(
        None,
        "with a causal context, how the first token of a block is predicted: from the clean text before the block, in "
        "a pass of its own, or as the others (default: causal)",
        choices=FIRST_TOKENS,
    )
    nucleus_p: Annotated[float | None, Range(0, 1, open_low=True) | None] = setting(
        None, f"with the sampler scdd, draw from the most likely tokens up to this probability (default: {NUCLEUS_P})"
    )
    # Of models with uniform noise (`uniform.py`)
    end_temperature: Annotated[float | None, POSITIVE | None] = setting(
        None, "with uniform noise, the temperature falls linearly from --temperature to this in each block"
    )
    self_conditioning: bool = setting(
        True,
        "with uniform noise, a pass also sees the distributions of the pass before (default: True)",
        action=argparse.BooleanOptionalAction,
    )
    output: str = setting(
        "argmax",
        "with uniform noise, what the last pass of a block leaves there: its argmax or its draw",
        choices=OUTPUTS,
    )
    stop_entropy: Annotated[float | None, AMOUNT | None] = setting(
        None,
        "with uniform noise, a block ends when its argmax repeats and its mean entropy in nats is below this (default: "
        f"{STOP_ENTROPY}); 0: never",
    )
    # Without flags; RL sets them. Draw from the `top_k` most likely tokens (0: from all), and from the most likely ones
    # whose probabilities sum to `top_p`.
    top_k: Annotated[int, NATURAL] = 0
    top_p: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    record_as_sampled: bool = False  # record log-probabilities of the distribution drawn from, not of the model's own

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            kind = Integral if allowed.integer else Real  # a command line converts words, nothing else does
            if value not in allowed or not isinstance(value, (kind, type(None))):
                raise ValueError(f"{name} must be {allowed}, got {value!r}")
            if allowed.integer or value is None:
                continue
            if math.copysign(1, value) < 0:
                raise ValueError(f"{name} must be {allowed}, got {value!r}: write 0")
            if value and not SMALLEST <= float(value) <= LARGEST:
                span = f"from {SMALLEST:g} to {LARGEST:g}, for 32 bits"
                raise ValueError(f"{name} must be {allowed}, and if it is not 0 {span}; got {value!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            choices = field.metadata.get("choices", (value,))
            if value not in choices and (value is not None or field.default is not None):
                raise ValueError(
                    f"{field.name} must be one of {', '.join(choices)}, got {value!r}{nearest(value, choices)}"
                )
        orders = " or ".join(name for name, order in REMASKING.items() if order.by_confidence)
        ignored = f"would be ignored by the sampler {self.sampler}: choose a"
        of_rules = self.reveal is not None or self.reveal_level is not None
        of_edits = any(value is not None for value in (self.edit_threshold, self.max_post_steps, self.editing))
        drawn_apart = (self.top_k, self.top_p) != (0, 1) or self.record_as_sampled
        wrong = {  # message -> whether it is so; the first one is raised
            f"kv_cache={self.kv_cache!r} {ignored} cached one, or leave kv_cache out (in RL --kv_cache none, if a "
            "method sets it)": self.kv_cache is not None and self.cache is None,
            f"edit_threshold, max_post_steps and editing {ignored} parallel one": of_edits and self.rule is None,
            "max_post_steps would be ignored: nothing is edited without edit_threshold or editing": (
                self.max_post_steps is not None and self.edits is None
            ),
            f"editing={self.editing!r} has a level of the rule threshold, not of {self.rule}: give edit_threshold": (
                self.editing is not None and self.rule not in (None, "threshold")
            ),
            f"editing predicts all of a block in every pass, and the cache {self.cache} keeps old keys and values of "
            "it: use the sampler parallel, which is exact with a block-causal model's own cache": (
                self.edits is not None and self.cache is not None
            ),
            f"reveal and reveal_level {ignored} parallel one": of_rules and self.rule is None,
            f"nucleus_p={self.nucleus_p} would be ignored by the sampler {self.sampler}: choose scdd": (
                self.nucleus_p is not None and self.sampler != "scdd"
            ),
            "top_k, top_p and record_as_sampled need a temperature above 0": drawn_apart and not self.temperature,
            f"a parallel sampler reveals by confidence: it needs remasking {orders}, got {self.remasking}": (
                self.rule is not None and not REMASKING[self.remasking].by_confidence
            ),
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(message)
        self.schedule()

    @classmethod
    def from_attributes(cls, source: Any, model_config: Any = None, **called: str) -> SamplingSettings:
        """The settings that `source` holds as attributes. `called` maps a field to its other name there. A
        `block_length` of None becomes the block size of the model with this config, or 32; `steps` of None become
        `default_steps`."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = called.get(field.name, field.name)
            if hasattr(source, name):
                values[field.name] = getattr(source, name)
        if values["block_length"] is None:
            values["block_length"] = block_size(model_config) or BLOCK_LENGTH
        if values["steps"] is None:
            first = values.get("first_token")
            if first is None and model_config is not None:
                from d1.models.attention import has_causal_context  # needs torch

                first = "causal" if has_causal_context(model_config) else None
            values["steps"] = default_steps(values["gen_length"], values["block_length"], first == "causal")
        settings = cls(**values)
        return settings if model_config is None else settings.for_model(model_config)

    def for_model(self, model_config: Any) -> SamplingSettings:
        """These settings, with a `first_token` if and only if a model of this config has a causal context; for others,
        "masked" says nothing."""
        from d1.models.attention import has_causal_context  # needs torch

        if has_causal_context(model_config):
            return self if self.first_token else replace(self, first_token="causal")
        return replace(self, first_token=None) if self.first_token == "masked" else self

    def require_whole_blocks(self, length: str = "gen_length") -> None:
        """Refuse (ValueError) a block length that does not divide the completion, whose setting is called `length`."""
        if self.gen_length % self.block_length:
            raise ValueError(f"{length} ({self.gen_length}) must be a multiple of block_length ({self.block_length})")

    @property
    def cache(self) -> str | None:
        """The cache in use, or None."""
        return (self.kv_cache or "dual") if "cached" in self.sampler else None

    @property
    def draw_distribution(self) -> Distribution:
        """The distribution that tokens are drawn from; at temperature 0, the model's own."""
        return Distribution(self.temperature, self.top_k, self.top_p) if self.temperature else MODEL_DISTRIBUTION

    @property
    def record_distribution(self) -> Distribution:
        """The distribution whose log-probabilities a rollout records."""
        return self.draw_distribution if self.record_as_sampled else MODEL_DISTRIBUTION

    @property
    def rule(self) -> str | None:
        """The reveal rule in use, or None if the schedule alone says how many tokens a step reveals."""
        return (self.reveal or "threshold") if "parallel" in self.sampler else None

    @property
    def level(self) -> float:
        """The level of the rule in use; 0 without one."""
        if self.rule is None:
            return 0.0
        if self.reveal_level is not None:
            return self.reveal_level
        if self.editing:
            return EDITING[self.editing][0]
        return RULES[self.rule].level

    @property
    def nucleus(self) -> float:
        """The probability up to which the sampler scdd keeps the most likely tokens."""
        return NUCLEUS_P if self.nucleus_p is None else self.nucleus_p

    @property
    def edits(self) -> float | None:
        """The probability above which another token replaces a revealed one; None: revealed tokens stay."""
        if self.edit_threshold is None and self.editing is not None:
            return EDITING[self.editing][1]
        return self.edit_threshold

    @property
    def rewrites(self) -> bool:
        """Whether a token that is visible may be replaced."""
        return self.edits is not None or self.sampler == "scdd"

    @property
    def post_steps(self) -> int:
        """Passes per block after its last mask is filled, at most; 0 without editing."""
        if self.edits is None:
            return 0
        return POST_STEPS if self.max_post_steps is None else self.max_post_steps

    @property
    def max_writes(self) -> int:
        """How often a position of the canvas may be written, at most: in every pass of its block."""
        if self.edits is None:
            return 1
        return max(2, min(self.block_length, self.gen_length) + self.post_steps)

    @property
    def passes_per_block(self) -> int:
        """Of a model with uniform noise, whose blocks all have the same number of passes, at most."""
        return self.steps * self.block_length // self.gen_length

    def temperature_of(self, number: int) -> float:
        """The temperature of pass `number`, from 0, of a block of a model with uniform noise."""
        return linear_temperature(self.temperature, self.end_temperature, number, self.passes_per_block)

    @property
    def stops_below(self) -> float:
        """The mean entropy below which a block of a model with uniform noise may end."""
        return STOP_ENTROPY if self.stop_entropy is None else self.stop_entropy

    def max_passes(self, filled: int | None = None) -> int:
        """Maximum number of forward passes per completion; `filled` as for `schedule`."""
        return sum(len(block) + self.post_steps for block in self.schedule(filled))

    @property
    def draws(self) -> bool:
        """Whether sampling draws random numbers; without them, all samples of a prompt are equal."""
        return self.temperature > 0 or REMASKING[self.remasking].draws

    def schedule(self, filled: int | None = None) -> list[list[int]]:
        """Tokens revealed in each step of each block, unless a rule reveals more: one list per block. In a block-causal
        model, `filled` is the number of prompt tokens in the block in which the prompt ends. With a `first_token`,
        blocks begin after the prompt, and a causal one takes a step of its own."""
        if filled is None and self.first_token is None:
            return reveal_schedule(self.gen_length, self.block_length, self.steps)
        filled = 0 if filled is None or self.first_token is not None else filled
        ends = [0, *range(self.block_length - filled, self.gen_length, self.block_length), self.gen_length]
        sizes = [end - start for start, end in pairwise(ends)]
        if self.first_token is None:
            return block_schedule(sizes, self.steps)
        rest: list[int] = []  # the sizes of blocks without a first token that takes a step
        which = ""
        if self.first_token == "causal":
            rest = [size - 1 for size in sizes if size > 1]
            which = ", whose first tokens take a step each,"
        needed = len(sizes) + len(rest)
        if not needed <= self.steps <= self.gen_length:
            raise ValueError(
                f"{self.gen_length} tokens in {len(sizes)} blocks{which} need between {needed} and {self.gen_length} "
                f"steps, got {self.steps}"
            )
        if self.first_token != "causal":
            return block_schedule(sizes, self.steps)
        later = iter(block_schedule(rest, self.steps - len(sizes)))
        return [[1, *(next(later) if size > 1 else ())] for size in sizes]


def check_sampler(settings: SamplingSettings, config: Any, other_blocks: bool = False) -> None:
    """Raise ValueError if the settings do not suit the kind of model."""
    from d1.models.attention import attention_of, has_causal_context  # needs torch

    kind, size = config.model_type, block_size(config)
    if has_masks(config):
        for name, unset in UNIFORM_NOISE_DEFAULTS.items():
            if getattr(settings, name) != unset:
                raise ValueError(
                    f"{name} {getattr(settings, name)} is for models with uniform noise, and {kind} has masks"
                )
    else:
        check_uniform(settings, kind)
    if settings.sampler == "scdd":
        check_scdd(settings, config)
    if settings.cache is not None:
        caches = attention_of(config).caches
        wrong = {
            f"{kind} is an encoder, which has no key-value cache in Transformers": is_encoder(config),
            f"{kind} with blocks of {size} tokens needs no cached sampler: the other samplers already cache its "
            "finished blocks, without any loss": size is not None,
            f"{kind} has layers with windowed attention, whose cache drops keys": windowed(config),
            f"the cache {settings.cache} is wrong for {attention_name(config)} attention, which allows "
            f"{', '.join(caches or ()) or 'none'}": caches is not None and settings.cache not in caches,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"{what}: use the sampler exact or parallel")
    causal_context = has_causal_context(config)
    if causal_context:
        wrong = {
            "guidance (cfg_scale), because text before a prompt is never hidden from it": settings.cfg_scale > 0,
            "editing, because no model with it learnt to correct its tokens": settings.edits is not None,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"this {kind} has a causal context and cannot sample with {what}")
    elif settings.first_token == "causal":
        raise ValueError(f"first_token='causal' is for models with a causal context, not for this {kind}")
    if not (other_blocks or causal_context) and size not in (None, settings.block_length):
        raise ValueError(
            f"this {kind} has blocks of {size} tokens, so block_length must be {size}, not "
            f"{settings.block_length}; d1.sampling.rollout accepts other lengths with other_blocks=True"
        )


def check_mask_token_id(mask_token_id: Any, config: Any) -> None:
    """Raise ValueError unless it is an id of the model, or the model has no masks."""
    if has_masks(config) and (mask_token_id is None or not 0 <= mask_token_id < vocabulary(config)):
        raise ValueError(
            f"mask_token_id must be one of the model's {vocabulary(config)} ids, got {mask_token_id}: the tokenizer of "
            "d1.models.load_tokenizer has it"
        )


def check_uniform(settings: SamplingSettings, kind: str) -> None:
    """Raise ValueError for settings that the sampler of a model with uniform noise does not have."""
    blocks = settings.gen_length // settings.block_length
    released = "--sampler parallel --reveal entropy --temperature 0.8 --end_temperature 0.4"
    wrong = {
        f"reveals by the entropy bound alone: {released}": settings.rule != "entropy",
        f"draws from tempered distributions: {released}": not settings.temperature,
        "accepts by entropy: leave remasking out": settings.remasking != "low_confidence",
        "has no guidance: leave cfg_scale out": settings.cfg_scale,
        "draws from the whole vocabulary: leave top_k and top_p out": settings.draw_distribution.truncates,
        "records log-probabilities of what it draws from in any case: leave record_as_sampled (in RL "
        "score_as_sampled) out": settings.record_as_sampled,
        "accepts or renoises each token anew: leave edit_threshold and editing out": settings.edits is not None,
        f"fills whole blocks: gen_length must be a multiple of {settings.block_length}, not {settings.gen_length}": (
            settings.gen_length % settings.block_length
        ),
        f"takes equal steps in each block: steps must be a multiple of {blocks}, not {settings.steps}": (
            settings.steps % max(blocks, 1)
        ),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"the sampler of {kind} {what}")


def check_scdd(settings: SamplingSettings, config: Any) -> None:
    """Raise ValueError for models and settings that the sampler scdd does not suit."""
    ratio, kind = getattr(config, "uniform_ratio", None), config.model_type
    learnt = isinstance(ratio, Real) and ratio in BELOW_ONE
    wrong = {
        f"needs full attention, and {kind} has {attention_name(config)} attention": attention_name(config) != "full",
        f"is for models of SFT with --noise scdd, and the config of this {kind} has uniform_ratio {ratio}": not learnt,
        "draws from the model's distribution: set --temperature, 1 as published": not settings.temperature,
        "reveals by the posterior: leave remasking out": settings.remasking != "low_confidence",
        "has no guidance: leave cfg_scale out": settings.cfg_scale,
        "cuts distributions by nucleus_p: leave top_k and top_p out": settings.draw_distribution.truncates,
        "records log-probabilities of the model alone: leave record_as_sampled out": settings.record_as_sampled,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"the sampler scdd {what}")


def check_start(settings: SamplingSettings, config: Any) -> None:
    """Raise ValueError if sampling cannot continue from canvases with tokens (`RolloutStart`)."""
    from d1.models.attention import has_causal_context  # needs torch

    wrong = {
        f"{config.model_type} has uniform noise, where every token changes in each pass": not has_masks(config),
        f"{config.model_type} has a causal context, whose blocks begin with a pass for their first token": (
            has_masks(config) and has_causal_context(config)
        ),
        "the sampler scdd may replace every token": settings.sampler == "scdd",
        "edit_threshold and editing may replace the tokens that are there": settings.edits is not None,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"sampling cannot continue from a canvas with tokens: {what}")


def refuse_scdd(settings: SamplingSettings, what: str) -> None:
    """Raise ValueError if `what`, the subject of the message, cannot sample by scdd."""
    if settings.sampler == "scdd":
        raise ValueError(f"{what} has no sampler scdd, which fills the blocks of whole batches: choose another sampler")


# --- Flags of every command that loads a model and samples ------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")
COMPILE = ("none", "layers", "graphs")
COMPILE_HELP = (
    "how sampling runs forward passes: none; layers, by torch.compile; or graphs, by CUDA graphs, for passes of few "
    "tokens and small models (default: none)"
)
RANGES = ranges_of(SamplingSettings)
GEN_LENGTH_HELP = (
    f"tokens per completion (default: max_new_tokens of the model's generation_config.json, or {GEN_LENGTH})"
)


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags of every command that loads a model."""

    model_path: str = setting(
        help="folder or hub name of a model, or folder of an adapter", aliases=["--model_name"], group="model"
    )
    checkpoint_path: str | None = setting(None, "LoRA adapter to put on the model")
    dtype: str | None = setting(
        None,
        "data type of the weights (default: bfloat16 on a GPU, float32 on a CPU; eval: bfloat16 also on a CPU with "
        "fast bf16)",
        choices=DTYPES,
    )
    attn_implementation: str | None = setting(None, "sdpa, eager or flash_attention_2")
    compile: str = setting("none", COMPILE_HELP, choices=COMPILE)
    plain_chat_template: bool = setting(False, "use a plain template if the tokenizer has none")

    def read_folder(self) -> ModelFolder:
        """The model with its adapter. A command calls it once."""
        from d1.models.folder import ModelFolder  # needs torch

        return ModelFolder.read(self.model_path, self.checkpoint_path or None)

    def load_tokenizer(self) -> Any:
        """The tokenizer in the adapter's folder, else, if that has none, the model's."""
        from d1.models.tokenizer import load_tokenizer

        path = self.model_path
        if self.checkpoint_path:
            adapter = Path(self.checkpoint_path)
            if not adapter.is_dir() or (adapter / "tokenizer_config.json").is_file():
                path = self.checkpoint_path
        return load_tokenizer(path, plain_chat_template=self.plain_chat_template)


def sampling_flag(name: str, **changes: Any) -> Any:
    """A flag with the range, default, help and choices of a field of `SamplingSettings`, except for `changes`. The
    default of a field without one is None."""
    field = SamplingSettings.__dataclass_fields__[name]
    options: dict[str, Any] = {"default": None if field.default is MISSING else field.default}
    if name in RANGES:
        options["type"] = RANGES[name]
    options.update(field.metadata)
    options.update(changes)
    return setting(**options)


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags of every command that samples: those of `SamplingSettings`, and the seed. `sampling_settings` fills in what
    is None."""

    gen_length: int | None = sampling_flag("gen_length", help=GEN_LENGTH_HELP, group="sampling")
    block_length: int | None = sampling_flag("block_length")
    diffusion_steps: int | None = sampling_flag("steps", aliases=["--steps"])
    temperature: float = sampling_flag("temperature")
    cfg_scale: float = sampling_flag("cfg_scale")
    remasking: str = sampling_flag("remasking")
    sampler: str = sampling_flag("sampler")
    kv_cache: str | None = sampling_flag("kv_cache")
    reveal: str | None = sampling_flag("reveal")
    reveal_level: float | None = sampling_flag("reveal_level")
    edit_threshold: float | None = sampling_flag("edit_threshold")
    max_post_steps: int | None = sampling_flag("max_post_steps")
    editing: str | None = sampling_flag("editing")
    first_token: str | None = sampling_flag("first_token")
    nucleus_p: float | None = sampling_flag("nucleus_p")
    end_temperature: float | None = sampling_flag("end_temperature")
    self_conditioning: bool = sampling_flag("self_conditioning")
    output: str = sampling_flag("output")
    stop_entropy: float | None = sampling_flag("stop_entropy")
    seed: Annotated[int, SEED] = setting(0, "seed of the random draws")

    @property
    def edits(self) -> bool:
        """Whether they ask for editing."""
        return self.edit_threshold is not None or self.editing is not None


def sampling_settings(flags: SamplingFlags, model_config: Any = None) -> SamplingSettings:
    """The settings that flags choose, with defaults for what is None; ValueError if they are wrong or, with a
    `model_config`, do not suit that kind of model.

    A model's own length (`ModelFolder.gen_length`) is no default here."""
    if flags.gen_length is None:
        flags = replace(flags, gen_length=GEN_LENGTH)
    settings = SamplingSettings.from_attributes(flags, model_config, steps="diffusion_steps")
    if model_config is not None:
        check_sampler(settings, model_config)
    return settings
