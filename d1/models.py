"""Load masked diffusion language models, whose logits score the token AT each position and see the whole text.

Folders to folders and estimates, on the command line:
    python -m d1.models a2d SRC OUT                     # autoregressive Llama/Qwen -> masked diffusion model
    python -m d1.models merge BASE ADAPTER [ADAPTER ...] OUT
    python -m d1.models export SRC OUT --format llada   # LLaDA's own names, for LLaDA's own code
    python -m d1.models fit --model_path X --stage rl --gpus 8

Kinds (`d1/checkpoints.py`): LLaDA, Dream, Llama/Qwen/Gemma decoders with attention turned both ways, and masked-LM
encoders. All run on the classes in Transformers, with two hooks on the body (the model without its head): one gives
each token the position it would have without padding, one moves the hidden states of models that predict the next token
(Dream) to the position they speak of. The body is where both work unchanged under PEFT, DDP, FSDP, DeepSpeed and TRL.
Windowed layers (Gemma, ModernBERT) keep their window, made symmetric; their full layers carry the rest.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.utils import cached_file

from d1.adapters import adapter_chain, add_adapter, check_there, merge_adapter
from d1.checkpoints import DECODERS, ENCODERS, native_config, needs_copy, reading
from d1.last_layer import can_narrow, in_parts, narrow

logger = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")  # LLaDA and Llama 3, Qwen and Dream, Gemma

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def count_positions(mask: Tensor) -> Tensor:
    """Position ids (rows, length) that count the real tokens of `mask` only."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def place_tokens(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the body: position ids count real tokens only, so padding cannot move a row."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is not None or (mask is not None and mask.dim() != 2):
        return args, kwargs
    if mask is None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = torch.ones_like((kwargs["inputs_embeds"][..., 0] if ids is None else ids), dtype=torch.long)
    # RoBERTa's table of positions starts after the row of its padding token.
    first = body.config.pad_token_id + 1 if body.config.model_type == "roberta" else 0
    kwargs["position_ids"] = count_positions(mask) + first
    return args, kwargs


def real_before(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """The index of the real token before each of `tokens` (rows, length, ...), for models that predict the next one.

    A row's first real token has nobody before it and is its own, as in Dream's published sampler. With a cache the mask
    covers it too: the tokens of this pass are its last columns.
    """
    rows, length = tokens.shape[:2]
    index = torch.arange(length, device=tokens.device).expand(rows, length)
    seen = index if mask is None else torch.where(mask[:, -length:].bool(), index, -1).cummax(-1).values
    before = torch.cat([seen.new_full((rows, 1), -1), seen[:, :-1]], dim=1)
    return torch.where(before < 0, index, before)


def seen_keys(mask: Tensor | None) -> Tensor | None:
    """(rows, keys) of a mask that may be spread over the queries already, (rows, 1, queries, keys)."""
    return mask if mask is None or mask.dim() == 2 else mask[:, 0, 0]


def align_positions(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of a body that predicts the next token: states are asked for one real token earlier."""
    positions = kwargs.get("state_positions")
    if positions is not None:
        before = real_before(seen_keys(kwargs.get("attention_mask")), kwargs["input_ids"])
        kwargs["state_positions"] = before.gather(1, positions)
    return args, kwargs


def align_states(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a body that predicts the next token: state i becomes that of the real token before i."""
    if kwargs.get("state_positions") is None:
        states = output[0]
        before = real_before(seen_keys(kwargs.get("attention_mask")), states)
        output.last_hidden_state = states.gather(1, before[..., None].expand_as(states))
    return output


def keep_states(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of an encoder's body: `logits_to_keep`, which Transformers gives to decoders only."""
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor):
        output.last_hidden_state = output[0][:, keep]
    elif keep:
        output.last_hidden_state = output[0][:, -keep:]
    return output


def attach_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model of a supported kind, however it was built, the calling convention of `load_model`."""
    body = model.base_model
    body.register_forward_pre_hook(place_tokens, with_kwargs=True)
    if getattr(model.config, "predicts_next_token", False):
        body.register_forward_pre_hook(align_positions, with_kwargs=True)
        body.register_forward_hook(align_states, with_kwargs=True)
    if model.config.model_type in DECODERS:
        cast(Any, body).layers[-1].register_forward_pre_hook(narrow, with_kwargs=True)
    if model.config.model_type in ENCODERS:
        body.register_forward_hook(keep_states, with_kwargs=True)
    # Trainers read it; masked-LM classes have none.
    if getattr(model, "generation_config", None) is None:
        model.generation_config = GenerationConfig()
    # nn.Embedding gives the padding row no gradient, but in these models padding is often EOS, a token to learn.
    cast(torch.nn.Embedding, model.get_input_embeddings()).padding_idx = None
    return model


def load_model(
    path: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    adapter: str | Path | Sequence[str | Path] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> PreTrainedModel | PeftModel:
    """Load a model in eval mode: `model(input_ids, attention_mask).logits[b, i]` scores the token AT position i.

    Every position sees every real one; `attention_mask` (rows, length) may hide padding on either side. Positions are
    counted inside. `logits_to_keep`, a 1-D LongTensor of positions, restricts the logits to (rows, len, vocab).

    Args:
        path: A checkpoint folder or hub name, or the folder of an adapter, whose base is then loaded first.
        dtype: Of the weights; None is float32, "auto" that of the checkpoint.
        device: Weights go straight there; None leaves them on the CPU.
        adapter: Adapter folder(s) on top, in order of training: all but the last are merged into the weights.
        attn_implementation: "sdpa", "eager" or "flash_attention_2"; None lets Transformers choose.
        trust_remote_code: Run the code in the checkpoint for a kind that is not native here. Such a model is returned
            as its code builds it, with none of the promises above.
        quantization: "nf4" for 4-bit weights (QLoRA, arXiv 2305.14314), which needs bitsandbytes.

    Raises:
        ValueError: The kind is not supported, or weights are missing, unexpected or of another shape.
    """
    base, adapters = adapter_chain(str(path), adapter)
    if quantization is not None and len(adapters) > 1:
        raise ValueError("4-bit weights cannot take a merged adapter: run `python -m d1.models merge` first")
    model = load_base(base, dtype, device, attn_implementation, trust_remote_code, quantization)
    for folder in adapters[:-1]:
        model = merge_adapter(add_adapter(model, folder), folder)
    return (add_adapter(model, adapters[-1]) if adapters else model).eval()


def load_base(
    path: str,
    dtype: torch.dtype | str | None,
    device: str | torch.device | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
    quantization: str | None,
) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": dtype or torch.float32, "attn_implementation": attn_implementation}
    if device is not None and torch.device(device).type != "cpu":
        options["device_map"] = {"": device}
    if quantization is not None:
        options["quantization_config"] = quantization_config(quantization, options["dtype"])
    if trust_remote_code and "auto_map" in PreTrainedConfig.get_config_dict(path)[0]:
        return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, **options)
    config, mapping = native_config(path)
    auto: Any = AutoModelForMaskedLM if config.model_type in ENCODERS else AutoModelForCausalLM
    options |= {"key_mapping": mapping, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        with reading(copies=needs_copy(path, options["dtype"], options.get("device_map"))):
            model, report = auto.from_pretrained(path, config=config, **options)
    except SafetensorError as error:
        raise ValueError(f"{path}: a file of weights is damaged or cut off ({error})") from error
    check_loaded(path, report)
    if mapping is not None:
        del model._weight_conversions  # or `save_pretrained` would write the old names back
    if Path(path).is_dir():  # adapters made on this model keep its name as the way back
        model.name_or_path = str(Path(path).resolve())
    return attach_hooks(model)


def check_loaded(path: str, report: dict[str, Any]) -> None:
    """Raises ValueError with every weight that was missing, unexpected or of another shape.

    Heads of BERT's pretraining that a masked LM has no use for are not an error.
    """
    spare = ("pooler.", "cls.seq_relationship.", "position_ids")
    wrong = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(k for k in report["unexpected_keys"] if not any(s in k for s in spare)),
        "mis-shaped (name, file, model)": sorted((k, tuple(a), tuple(b)) for k, a, b in report["mismatched_keys"]),
    }
    wrong["errors"] = list(report["error_msgs"])
    if any(wrong.values()):
        lists = "\n".join(f"{len(keys)} {what}: {keys}" for what, keys in wrong.items() if keys)
        raise ValueError(f"{path}: the weights do not fit the model that config.json describes\n{lists}")


def quantization_config(name: str, compute_dtype: torch.dtype) -> Any:
    if name != "nf4":
        raise ValueError(f"quantization {name!r} is unknown: only 'nf4' is supported")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ImportError("quantization='nf4' needs bitsandbytes: pip install bitsandbytes") from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def body_and_head(model: torch.nn.Module) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """The two halves of a model of `load_model`, for scoring without the logits of every position at once.

    Returns:
        `body(input_ids, attention_mask, positions)` -> last hidden states, aligned to the token they score:
        (rows, length, hidden), or (rows, n, hidden) at each row's own `positions` (rows, n), where most decoders run
        their last layer alone.
        `head(states)` -> logits (..., vocab). `head(body(...))` equals `model(...).logits` for every kind.
    """
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model

    def body(
        input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        narrowed = positions is not None and can_narrow(inner)
        if narrowed:
            kwargs["state_positions"] = positions
        states = inner.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        if positions is None or narrowed:
            return states
        return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.shape[-1]))

    return body, lambda states: next(logit_parts(model, states, whole=True))[1]


def logit_parts(model: torch.nn.Module, states: Tensor, whole: bool = False) -> Iterator[tuple[int, Tensor]]:
    """The head of `body_and_head` in parts of the vocabulary: where each starts, and its logits (..., part)."""
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    kind, cap = inner.config.model_type, getattr(inner.config, "final_logit_softcapping", None)
    if kind == "bert":
        yield 0, inner.cls(states)
    elif kind == "modernbert":
        yield 0, inner.decoder(inner.head(states))
    else:
        parts = iter([(0, inner.lm_head(states))]) if whole else in_parts(inner.lm_head, states)
        for start, logits in parts:
            yield start, logits if cap is None else torch.tanh(logits / cap) * cap


def load_tokenizer(
    path: str | Path,
    *,
    mask_token: str | None = None,
    pad_token: str | None = None,
    eos_token: str | None = None,
    eot_token: str | None = None,
    plain_chat_template: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, padding left, with every special token this project relies on.

    Tokens come from the arguments, else the tokenizer, else the ids in `config.json`; the end-of-turn token (as
    `tokenizer.eot_token`) also from the usual names, else it is EOS; padding falls back to EOS, EOS to BERT's [SEP].
    `save_pretrained` keeps all of it. SFT, RL and eval all use this tokenizer's chat template.

    Args:
        path: A checkpoint folder, hub name or adapter folder (its own tokenizer, else that of its base).
        plain_chat_template: Give a tokenizer without a chat template `PLAIN_CHAT_TEMPLATE`: one line
            "role: content" a message, then "assistant: ". A template that is there is kept.

    Raises:
        ValueError: No mask or EOS token can be found, or an id lies outside the model's embedding.
    """
    check_there(str(path))
    folder = str(path) if has_tokenizer(str(path)) else adapter_chain(str(path), None)[0]
    if not has_tokenizer(folder):
        unknown = "" if Path(folder).is_dir() else " (it is no folder here, and the hub or its cache has no such model)"
        raise FileNotFoundError(
            f"{folder} holds none of {', '.join(VOCABULARIES)}: there is no tokenizer to load{unknown}"
        )
    raw = config_beside(folder)
    cls: Any = AutoTokenizer
    if not trust_remote_code:  # these name code of their own, which only wraps what Transformers has
        cls = {"llada": PreTrainedTokenizerFast, "Dream": Qwen2Tokenizer}.get(raw.get("model_type", ""), AutoTokenizer)
    options = {"padding_side": "left"} | ({"trust_remote_code": True} if trust_remote_code else {})
    tokenizer = cls.from_pretrained(folder, **options)
    tokens = special_tokens(tokenizer, raw, mask_token=mask_token, pad_token=pad_token, eos_token=eos_token)
    vocab = tokenizer.get_vocab()
    eot = eot_token or getattr(tokenizer, "eot_token", None) or next((t for t in END_OF_TURN if t in vocab), None)
    tokens["eot_token"] = eot or tokens["eos_token"]
    for name, token in tokens.items():
        if token not in vocab:
            raise ValueError(f"{folder}: {name} {token!r} is not in the tokenizer")
        if vocab[token] >= raw.get("embedding_size", raw.get("vocab_size", len(vocab))):
            raise ValueError(f"{folder}: {name} {token!r} has id {vocab[token]}, outside the model's embedding")
    tokenizer = cls.from_pretrained(folder, **options, **tokens)
    if tokenizer.chat_template is None and plain_chat_template:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase, path: str | Path, flag: str = "--plain_chat_template"
) -> None:
    """Raises ValueError for a tokenizer that cannot write prompts, with the `flag` that gives it a template."""
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {path} has no chat template: {flag} gives it one")


def has_tokenizer(folder: str) -> bool:
    """Whether the folder or hub name holds a vocabulary: some classes would start an empty one without a word."""
    return any(cached_file(folder, name, _raise_exceptions_for_missing_entries=False) for name in VOCABULARIES)


def config_beside(folder: str) -> dict[str, Any]:
    """`config.json` of the folder or hub name, {} where there is none (a tokenizer on its own)."""
    try:
        return PreTrainedConfig.get_config_dict(folder)[0]
    except OSError:
        return {}


def special_tokens(tokenizer: PreTrainedTokenizerBase, raw: dict[str, Any], **chosen: str | None) -> dict[str, str]:
    """Mask, EOS and padding token: the `chosen`, else the tokenizer's, else those of the ids in config `raw`."""
    found: dict[str, str] = {}
    for name in ("mask_token", "eos_token", "pad_token"):
        token = chosen[name] or getattr(tokenizer, name)
        id_ = raw.get(f"{name}_id")
        if token is None and isinstance(id_, int):
            token = tokenizer.convert_ids_to_tokens(id_)
        if token is None and name == "eos_token":
            token = tokenizer.sep_token  # what ends a text of BERT's
        if token is None and name == "pad_token":
            token = found["eos_token"]
        if token is None:
            raise ValueError(
                f"{tokenizer.name_or_path}: neither the tokenizer nor config.json names a {name}. Name one "
                f"(load_tokenizer(..., {name}=...)), or add a mask token with `python -m d1.models a2d`"
            )
        found[name] = token
    return found


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("a2d", help="autoregressive decoder -> masked diffusion model")
    sub.add_argument("source", metavar="SRC")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--mask_token", default="<|mask|>", help="a spare token of the tokenizer, or a new name")
    sub.add_argument("--keep_shift", action="store_true", help="go on predicting the next position, as Dream does")
    sub.add_argument("--plain_chat_template", action="store_true", help="for a tokenizer that has none")
    sub = commands.add_parser("merge", help="fold LoRA adapters into the weights")
    sub.add_argument("base", metavar="BASE")
    sub.add_argument("adapters", metavar="ADAPTER", nargs="+", help="in order of training")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--dtype", default="auto", help="of the merged weights (default: that of BASE)")
    sub.add_argument("--device", help="where to compute, e.g. cuda")
    sub = commands.add_parser("export", help="write the weight names and config of another project")
    sub.add_argument("source", metavar="SRC")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--format", choices=["llada"], required=True)
    sub = commands.add_parser("fit", help="memory of a stage by part, and the largest batch on each card")
    sub.add_argument("--model_path", required=True, help="only its config.json is read")
    sub.add_argument("--stage", choices=["sft", "rl", "eval"], required=True)
    sub.add_argument("--batch", type=int, default=1, help="rows a GPU (default: %(default)s)")
    sub.add_argument("--length", type=int, default=4096, help="tokens of a row, prompt and completion")
    sub.add_argument("--block_length", type=int, default=32)
    sub.add_argument("--gpus", type=int, default=1)
    sub.add_argument("--zero", type=int, choices=range(4), default=0, help="DeepSpeed ZeRO stage; 0 is plain DDP")
    sub.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    sub.add_argument("--lora_r", type=int, default=128, help="0: all weights are trained (default: %(default)s)")
    sub.add_argument("--lora_targets", choices=["attention", "all-linear"], default="attention")
    sub.add_argument("--load_in_4bit", action="store_true", help="frozen weights in NF4")
    sub.add_argument("--gradient_checkpointing", action="store_true")
    sub.add_argument("--beta", type=float, default=0.04, help="RL without LoRA keeps a reference model if > 0")
    return parser


def main(args: argparse.Namespace) -> None:
    from d1 import convert

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.command == "a2d":
        convert.a2d(args.source, args.out, args.mask_token, args.keep_shift, args.plain_chat_template)
    elif args.command == "merge":
        convert.merge(args.base, args.adapters, args.out, args.dtype, args.device)
    elif args.command == "export":
        convert.export_llada(args.source, args.out)
    elif args.command == "fit":
        from d1.memory import Setup, fit_table

        if min(args.batch, args.length, args.block_length, args.gpus) < 1 or args.lora_r < 0:
            raise ValueError("--batch, --length, --block_length and --gpus must be at least 1, --lora_r at least 0")
        fields = {name: value for name, value in vars(args).items() if name not in ("command", "model_path")}
        base, _ = adapter_chain(args.model_path, None)
        sys.stdout.write(fit_table(native_config(base)[0], Setup(**fields)) + "\n")


if __name__ == "__main__":
    try:
        main(make_parser().parse_args())
    except (ValueError, OSError) as error:
        sys.exit(f"d1.models: {error}")
