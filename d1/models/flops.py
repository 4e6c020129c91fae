"""How many floating-point operations a forward pass takes, from a model's config alone."""

from __future__ import annotations

from transformers import PreTrainedConfig

from d1.models.fit import total_and_active


def flops_per_token(config: PreTrainedConfig, context: int) -> float:
    """Floating-point operations of one token in a forward pass that attends to `context` tokens.

    2 per weight that processes the token, the head included, and 4 x layers x width of the heads x `context` for
    attention. Norms, rotary positions and adapters are left out.
    """
    _, active = total_and_active(config)
    if not config.tie_word_embeddings:
        active -= config.vocab_size * config.hidden_size  # looked up, not multiplied
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2.0 * active + 4.0 * config.num_hidden_layers * width * context
