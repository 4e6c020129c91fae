"""Tiny random checkpoints in the formats of published block-diffusion and sparse models, and a slow reference.

The reference computes logits from the released config and weights in plain tensor algebra, one token, head and expert
at a time, following the reports on LLaDA (arXiv 2502.09992, section 2 and appendix B), Dream (2508.15487), SDAR
(2510.06303), Fast-dLLM v2 (2509.26328), LLaDA-MoE (2509.24389) and LLaDA2 (2512.15745).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, MASK = 64, 3
IDS = torch.randint(4, 60, (2, 11), generator=torch.Generator().manual_seed(0))
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-06,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
QWEN = {"intermediate_size": 48, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False}
QWEN |= {"max_window_layers": 3, "attention_bias": False}
SDAR = {"mask_token_id": MASK, "block_size": 4, "attn_implementation": "flex_attention", "head_dim": 8}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {  # model_type -> the fields of a published config.json, at toy size
    "sdar": QWEN | SDAR,
    "sdar_moe": QWEN
    | SDAR
    | MIXTURE
    | {"moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "Fast_dLLM_Qwen": QWEN | {"bd_size": 5, "mask_token_id": MASK},
    "lladamoe": MIXTURE
    | {
        "dense_intermediate_size": 48,
        "expert_intermediate_size": 16,
        "shared_expert_intermediate_size": None,
        "rope_theta": 50000,
        "partial_rotary_factor": -1,
        "norm_topk_prob": False,
        "qk_layernorm": True,
        "moe_layer_freq": [1, 1, 1],
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "clip_qkv": None,
        "mask_token_id": MASK,
    },
    "llada2_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "num_experts": 8,
        "num_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "norm_head": False,
        "embedding_dropout": 0.0,
        "output_dropout": 0.0,
        "partial_rotary_factor": 0.5,
        "rope_theta": 600000,
        "block_size": 3,
        "mask_token_id": MASK,
    },
    "nemotron_labs_diffusion": {
        "intermediate_size": 48,
        "head_dim": 8,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "dlm_paradigm": "bidirectional",
        "dlm_loss_weight": None,
        "dp_varying_mask_ratio": False,
        "attn_implementation": "sdpa",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,  # queries from position 16 on are scaled
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "block_size": 4,
        "mask_token_id": MASK,
    },
}
BLOCKS = ("sdar", "sdar_moe", "Fast_dLLM_Qwen", "llada2_moe")  # block-causal attention
CAUSAL = "nemotron_labs_diffusion"  # clean text is read from left to right
HEAD = 8
# LLaDA's fields, modules and modules of a block -> those of the other formats
LLADA_FIELDS = {"n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads"}
LLADA_NAMES = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
LLADA_BLOCK = {"attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm", "attn_out": "self_attn.o_proj"}
LLADA_BLOCK |= {"ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj"}
LLADA_BLOCK |= {f"{name}_proj": f"self_attn.{name}_proj" for name in "qkv"}


def of_llada(name: str) -> str:
    """The name in the other formats of a LLaDA's weight, such as model.transformer.blocks.0.q_proj.weight."""
    *_, block, module, kind = name.split(".")
    inside = block.isdigit()
    return f"model.layers.{block}.{LLADA_BLOCK[module]}.{kind}" if inside else f"{LLADA_NAMES[module]}.{kind}"


def shapes_of(kind: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight in the files, by its published name."""
    width, heads = config["hidden_size"], config["num_attention_heads"] * HEAD
    kv = config["num_key_value_heads"] * HEAD
    llada2 = kind == "llada2_moe"
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    shapes["model.word_embeddings.weight" if llada2 else "model.embed_tokens.weight"] = (config["vocab_size"], width)

    def mlp(name: str, size: int) -> dict[str, tuple[int, ...]]:
        gate, down = (size, width), (width, size)
        return {f"{name}.gate_proj.weight": gate, f"{name}.up_proj.weight": gate, f"{name}.down_proj.weight": down}

    nemotron = kind == "nemotron_labs_diffusion"
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm.weight": (width,), f"{layer}.post_attention_layernorm.weight": (width,)}
        if llada2:
            shapes[f"{layer}.attention.query_key_value.weight"] = (heads + 2 * kv, width)
            shapes[f"{layer}.attention.dense.weight"] = (width, heads)
            shapes |= {f"{layer}.attention.{name}_layernorm.weight": (HEAD,) for name in ("query", "key")}
        else:
            sizes = {"q": heads, "k": kv, "v": kv}
            shapes |= {f"{layer}.self_attn.{name}_proj.weight": (size, width) for name, size in sizes.items()}
            shapes[f"{layer}.self_attn.o_proj.weight"] = (width, heads)
            if kind == "Fast_dLLM_Qwen":
                shapes |= {f"{layer}.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
            elif not nemotron:
                shapes |= {f"{layer}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
        if "num_experts" not in config or i < config.get("first_k_dense_replace", 0):
            shapes |= mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        size = config.get("expert_intermediate_size") or config["moe_intermediate_size"]
        shapes[f"{layer}.mlp.gate.weight"] = (config["num_experts"], width)
        for expert in range(config["num_experts"]):
            shapes |= mlp(f"{layer}.mlp.experts.{expert}", size)
        if llada2:
            shapes[f"{layer}.mlp.gate.expert_bias"] = (config["num_experts"],)
            shapes |= mlp(f"{layer}.mlp.shared_experts", size * config["num_shared_experts"])
    return {of_nemotron(name) if nemotron else name: shape for name, shape in shapes.items()}


def of_nemotron(name: str, back: bool = False) -> str:
    """Nemotron-Labs-Diffusion's name for a Ministral3's weight, or `back`."""
    for pair in (("model.", "encoder."), ("lm_head.", "diffusion_head.")):
        old, new = reversed(pair) if back else pair
        if name.startswith(old):
            return new + name.removeprefix(old)
    raise KeyError(name)


def config_of(kind: str, **fields: Any) -> dict[str, Any]:
    """A `config.json` of `kind`, with an `auto_map` to code that does not exist."""
    config = COMMON | CONFIGS[kind] | {"model_type": kind, "architectures": ["OwnModelLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModelLM",
    }
    return config | fields


def write_released(folder: Path, kind: str, dtype: torch.dtype = torch.float32, shards: int = 2, **fields: Any) -> Path:
    """A sharded checkpoint of `kind`."""
    config = config_of(kind, **fields)
    weights = {
        name: (torch.randn(shape) * 0.2 + (name.endswith("norm.weight"))).to(dtype)
        for name, shape in shapes_of(kind, config).items()
    }
    return write_files(folder, config, weights, shards)


def write_with_tokenizer(folder: Path, kind: str, source: Path, **fields: Any) -> Path:
    """A checkpoint of `kind` with the tokenizer and the chat template in `source`."""
    from d1.models import load_tokenizer

    tokenizer = load_tokenizer(str(source))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("mask_token_id", "pad_token_id", "eos_token_id", "bos_token_id")}
    return write_released(folder, kind, vocab_size=len(tokenizer), **ids | fields)


def write_shifted(folder: Path, source: Path) -> Path:
    """The weights of a model with a causal context, whose noised tokens are scored by the token before them."""
    from d1.models import load_model

    model: Any = load_model(source)
    model.config.update({"predicts_next_token": True, "released": None})
    model.save_pretrained(folder)
    return folder


def write_wide(folder: Path, source: Path) -> Path:
    """A Nemotron-Labs-Diffusion with linear layers for 4 bits, whose blocks have 64 weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 16, "num_key_value_heads": 8}
    return write_with_tokenizer(folder, CAUSAL, source, num_hidden_layers=2, **sizes)


def write_files(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shards: int = 2) -> Path:
    """Writes every `shards`-th weight to one file, so that the experts of a layer are spread over all files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(weights.items())[shard::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@torch.no_grad()
def logits_of(model: Any, ids: Tensor = IDS, mask: Tensor | None = None, **kwargs: object) -> Tensor:
    return model(input_ids=ids, attention_mask=mask, **kwargs).logits


def read_files(folder: Path) -> dict[str, Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequency(config: dict[str, Any], j: int, width: int) -> float:
    """By how much pair j of `width` numbers turns per position: theta^(-2j/width) or, with YaRN (arXiv 2309.00071,
    section 3.2), a mixture of this and of a `factor`-th of it."""
    yarn = config.get("rope_parameters") or {}
    theta = yarn.get("rope_theta") or config["rope_theta"]
    plain = theta ** (-2 * j / width)
    if not yarn:
        return plain
    turns = (
        yarn["original_max_position_embeddings"] / (2 * math.pi * yarn[name]) for name in ("beta_fast", "beta_slow")
    )
    low, high = (width * math.log(turn) / (2 * math.log(theta)) for turn in turns)
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    share = min(max((j - low) / (max(high, low + 0.001) - low), 0), 1)
    return share * plain / yarn["factor"] + (1 - share) * plain


def rotate(x: Tensor, config: dict[str, Any], width: int) -> Tensor:
    """Rotary positions t on (T, head): in the first `width`, pairs (j, j + width/2) turn by t times their frequency."""
    turned = x.clone()
    for t in range(len(x)):
        for j in range(width // 2):
            angle = torch.tensor(t * frequency(config, j, width))
            a, b = x[t, j], x[t, j + width // 2]
            turned[t, j] = a * angle.cos() - b * angle.sin()
            turned[t, j + width // 2] = b * angle.cos() + a * angle.sin()
    return turned


def seen_in_blocks(length: int, size: int) -> Tensor:
    """(T, T) bool, queries x keys: who sees whom in a text of `length` tokens in blocks of `size`."""
    return torch.tensor([[j // size <= i // size for j in range(length)] for i in range(length)])


def seen_by(kind: str, length: int, size: int | None) -> Tensor | None:
    """The same for a model of this kind; None: everything."""
    if kind == CAUSAL:
        return torch.ones(length, length, dtype=torch.bool).tril()
    return seen_in_blocks(length, size) if kind in BLOCKS and size else None


def feed_forward(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    gate, up = weights[f"{name}.gate_proj.weight"] @ x, weights[f"{name}.up_proj.weight"] @ x
    return weights[f"{name}.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def routed(x: Tensor, config: dict[str, Any], weights: dict[str, Tensor], name: str) -> dict[int, Tensor]:
    """The experts that one token's state (hidden) goes to, and the weight of each."""
    logits = weights[f"{name}.gate.weight"] @ x
    top = config["num_experts_per_tok"]
    if config["model_type"] != "llada2_moe":
        chances = logits.softmax(-1)
        chosen = chances.argsort(descending=True)[:top].tolist()
        total = sum(chances[e] for e in chosen) if config["norm_topk_prob"] else 1
        return {e: chances[e] / total for e in chosen}
    scores = torch.sigmoid(logits)
    wanted = scores + weights[f"{name}.gate.expert_bias"]  # the bias affects only the choice
    groups = list(wanted.view(config["n_group"], -1))
    best = sorted(range(len(groups)), key=lambda g: -groups[g].topk(2).values.sum().item())[: config["topk_group"]]
    size = len(groups[0])
    among = [e for e in range(len(wanted)) if e // size in best]
    chosen = sorted(among, key=lambda e: -wanted[e].item())[:top]
    total = sum(scores[e] for e in chosen)
    return {e: config["routed_scaling_factor"] * scores[e] / total for e in chosen}


def twin_logits(folder: Path, ids: Tensor, visible: Tensor | None = None) -> Tensor:
    """(T, vocab) for the ids (T) of one row, where each position predicts what its model was trained to predict there.

    Args:
        visible: (T, T) bool, queries x keys; None: every position sees all.
    """
    config, weights = json.loads((folder / "config.json").read_text()), read_files(folder)
    if "n_layers" in config:  # a LLaDA; its mixture has the same model_type
        config = {LLADA_FIELDS.get(name, name): value for name, value in config.items()}
        weights = {of_llada(name): weight for name, weight in weights.items()}
    llada2, eps = config["model_type"] == "llada2_moe", config["rms_norm_eps"]
    if config["model_type"] == CAUSAL:
        weights = {of_nemotron(name, back=True): weight for name, weight in weights.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool) if visible is None else visible
    x = weights["model.word_embeddings.weight" if llada2 else "model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
        if llada2:
            fused = y @ weights[f"{layer}.attention.query_key_value.weight"].T
            q, k, v = fused.split([heads * HEAD, kv_heads * HEAD, kv_heads * HEAD], -1)
        else:
            own = f"{layer}.self_attn"
            zero = torch.zeros(())
            q, k, v = (
                y @ weights[f"{own}.{n}_proj.weight"].T + weights.get(f"{own}.{n}_proj.bias", zero) for n in "qkv"
            )
        mixed = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            query, key, value = (
                states[:, n * HEAD : (n + 1) * HEAD] for states, n in ((q, head), (k, shared), (v, shared))
            )
            norms = [f"{layer}.attention.{n}_layernorm.weight" for n in ("query", "key")] if llada2 else []
            norms = norms or [f"{layer}.self_attn.{n}_norm.weight" for n in "qk"]
            if norms[0] in weights:
                query, key = rms_norm(query, weights[norms[0]], eps), rms_norm(key, weights[norms[1]], eps)
            width = HEAD // 2 if llada2 else HEAD
            query, key = (rotate(states, config, width) for states in (query, key))
            if "rope_parameters" in config:  # Llama 4's scale of queries at far positions
                period = config["rope_parameters"]["original_max_position_embeddings"]
                far = torch.tensor([math.log(1 + t // period) for t in range(len(ids))])
                query = query * (1 + config["rope_parameters"]["llama_4_scaling_beta"] * far).unsqueeze(1)
            scores = (query @ key.T / HEAD**0.5).masked_fill(~hidden, float("-inf"))
            mixed.append(scores.softmax(-1) @ value)
        out = "attention.dense" if llada2 else "self_attn.o_proj"
        x = x + torch.cat(mixed, -1) @ weights[f"{layer}.{out}.weight"].T
        y = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        x = x + torch.stack([layer_output(token, config, weights, f"{layer}.mlp") for token in y])
    return rms_norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def layer_output(x: Tensor, config: dict[str, Any], weights: dict[str, Tensor], name: str) -> Tensor:
    """The output of a layer's feed-forward, dense or with experts, for one token's state."""
    if f"{name}.gate.weight" not in weights:
        return feed_forward(x, weights, name)
    out = torch.zeros_like(x)
    for expert, share in routed(x, config, weights, name).items():
        out = out + share * feed_forward(x, weights, f"{name}.experts.{expert}")
    if config["model_type"] == "llada2_moe":
        out = out + feed_forward(x, weights, f"{name}.shared_experts")
    return out
