"""Work for the benchmarks: models of random weights, random ids and words for them, and the ways that are raced."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks import published
from d1 import sampling
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer, prepare
from d1.scoring import mean_field_logps
from d1.tasks import text_of

ROOT = Path(__file__).resolve().parents[1]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>"]  # ids 0 to 3
MASK = 3
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<bos> {{ message['content'] }} "
    "{% else %}{{ message['content'] }} <eos>{% endif %}{% endfor %}"
)
SIZES = {  # vocabulary, hidden, feed-forward, layers, heads
    "tiny": (2048, 32, 64, 2, 4),
    "pocket": (128, 64, 192, 4, 4),
    "60m": (26_000, 512, 2048, 8, 8),
    "wide": (126_464, 64, 128, 1, 4),  # LLaDA's vocabulary on next to no body: for the memory of logits
    "goal": (126_464, 512, 2048, 8, 8),
    "llada": (126_464, 4096, 12_288, 32, 32),  # LLaDA-8B
}


def random_model(size: str, vocabulary: int | None = None, block_size: int | None = None) -> Any:
    """A Llama of a size in `SIZES`, with random weights: bidirectional, or with a block size block-causal.

    Raises:
        ValueError: LLaDA-8B without a GPU.
    """
    default, hidden, feed_forward, layers, heads = SIZES[size]
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=vocabulary or default,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        is_causal=False,
        block_size=block_size,
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if size == "llada" and device == "cpu":
        raise ValueError(
            "no CUDA device here: LLaDA-8B's shape needs one with about 40 GB (80 GB for the published scoring at "
            "d1's settings). --size tiny runs the same code on any machine"
        )
    with torch.device(device):  # made where it is used: a large model need not fit elsewhere first
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return prepare(model).eval()


def random_prompts(model: Any, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask (rows, length), without padding or special tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
    return ids, torch.ones_like(ids)


def scoring_inputs(model: Any, args: Any) -> tuple[torch.Tensor, ...]:
    """Prompts and their mask (rows, prompt), completions (rows, length), and prompt noise (rows, mu, prompt)."""
    ids, mask = random_prompts(model, args.rows, args.prompt)
    completion, _ = random_prompts(model, args.rows, args.length)
    noise = torch.rand(args.rows, args.mu, args.prompt, generator=torch.Generator().manual_seed(2)) < 0.15
    return ids, mask, completion, noise.to(ids.device)


def our_scores(model: Any, ids: torch.Tensor, mask: torch.Tensor, completion: torch.Tensor, noise: torch.Tensor) -> Any:
    """Log-probs (rows, mu, completion) as the RL trainer takes them: one mask after the other."""
    options: dict[str, Any] = {"mask_token_id": MASK, "gen_length": completion.shape[1]}
    parts = [mean_field_logps(model, ids, mask, completion, one, **options) for one in noise.unbind(1)]
    return torch.stack(parts, dim=1)


def update(model: Any, score: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
    """The log-probs under the first mask, and their gradients."""
    score(model, *inputs[:3], inputs[3][:, :1]).sum().backward()
    model.zero_grad()  # or the next call would free these gradients and its peak miss them


def ways(
    model: Any, args: Any, samplers: Sequence[str] = ("exact",), seeded: bool = False, **options: Any
) -> dict[str, dict[str, Callable[[], Any]]]:
    """What is raced, by task: the published way first, then ours.

    Args:
        seeded: draw from one generator per row, as the parallel samplers must.
        options: arguments of `generate` in place of those of the benchmark.
    """
    inputs = scoring_inputs(model, args)
    lengths = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    settings: dict[str, Any] = {"mask_token_id": MASK, **lengths, **options}

    def sample(name: str) -> torch.Tensor:
        generators = [keyed_generator(0, row, device=model.device) for row in range(args.rows)] if seeded else None
        return sampling.generate(model, *inputs[:2], generator=generators, sampler=name, **settings)

    theirs: Callable[..., torch.Tensor] = functools.partial(published.score, mask_token_id=MASK)
    scores = {"published": theirs, "ours": our_scores}
    rollouts = {name: functools.partial(sample, name) for name in samplers}
    return {
        "rollout": {"published": lambda: published.generate(model, *inputs[:2], **settings), **rollouts},
        "scoring": {way: functools.partial(torch.no_grad()(score), model, *inputs) for way, score in scores.items()},
        "update": {way: functools.partial(update, model, score, inputs) for way, score in scores.items()},
    }


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token a word: w4, w5, ..."""
    words = {word: index for index, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), vocabulary))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "mask_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_words(count: int, vocabulary: int, source: random.Random) -> str:
    return " ".join(f"w{source.randrange(len(SPECIAL), vocabulary)}" for _ in range(count))


def different_words(completions: list, **columns: Any) -> list[float]:
    """The reward of random words: the share of them that differ."""
    texts = [text_of(completion).split() for completion in completions]
    return [len(set(words)) / max(len(words), 1) for words in texts]


def model_and_tokenizer(size: str) -> tuple[Any, Any]:
    """The pocket model, or a random one of another size, with its tokenizer."""
    if size == "pocket":
        path = str(ROOT / "pocket" / "base")
        return load_model(path), load_tokenizer(path)
    model = random_model(size)
    return model, word_tokenizer(model.config.vocab_size)
