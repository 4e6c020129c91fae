"""Make one checkpoint folder from another: merge adapters, write LLaDA's own format, turn a decoder both ways.

The commands `merge`, `export` and `a2d` of `python -m d1` call these functions.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from d1.models.adapters import adapter_chain, add_adapter, merge_adapter
from d1.models.formats.llada import TO_LLADA, llada_from_llama
from d1.models.formats.names import rename
from d1.models.kinds import is_decoder
from d1.models.load import load_model
from d1.models.tokenizer import PLAIN_CHAT_TEMPLATE, has_tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

MERGE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest logit


def fresh_folder(out: str) -> Path:
    """The output folder, which must not hold anything yet: a model being read must not be written over."""
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: name a new one")
    return folder


@torch.no_grad()
def probe(model: Any) -> Tensor:
    """fp32 logits (2, 16, vocab) on fixed ids, by which two versions of a model are compared."""
    ids = torch.arange(32).view(2, 16) * 7919 % model.config.vocab_size
    return model(input_ids=ids.to(model.device)).logits.float()


def merge(base: str, adapters: list[str], out: str, dtype: str = "auto", device: str | None = None) -> None:
    """Fold `adapters` into `base`, in order of training, and save the result with its tokenizer to `out`.

    Args:
        dtype: Of the merged weights; "auto" is that of the base.

    Raises:
        ValueError: Merging changed the logits by more than rounding in `dtype` can; nothing is written.
    """
    folder = fresh_folder(out)
    path, chain = adapter_chain(base, adapters)
    model: Any = load_model(path, dtype, device)
    for adapter in tqdm(chain, desc="merging", unit="adapter"):
        peft = add_adapter(model, adapter).eval()
        before = probe(peft)
        model = merge_adapter(peft, adapter)
        after = probe(model)
        change = ((after - before).abs().max() / before.abs().max()).item()
        if not change <= MERGE_TOLERANCE[model.dtype]:
            raise ValueError(f"merging {adapter} changed the logits by {change:.1%} of the largest: nothing is written")
        logger.info("merged %s: logits agree to %.2g of the largest", adapter, change)
    model.name_or_path = path
    model.save_pretrained(folder)
    save_tokenizer(path, folder)
    if not torch.equal(probe(load_model(out, model.dtype, device)), after):
        raise ValueError(f"{out} does not give the logits of the merged model: the disk or its files are damaged")


def load_whole(source: str) -> Any:
    """The model in `source`, in the dtype of its files; ValueError for an adapter, which is only part of one."""
    base, adapters = adapter_chain(source, None)
    if adapters:
        raise ValueError(f"{source} is an adapter: run `python -m d1 merge {base} {source} OUT` first")
    return load_model(source, "auto")


def save_tokenizer(source: str, folder: Path) -> None:
    """Copy the tokenizer, its special tokens resolved; weights alone are no error."""
    if has_tokenizer(source):
        load_tokenizer(source).save_pretrained(folder)
    else:
        logger.warning("%s has no tokenizer: %s holds the weights alone", source, folder)


def export_llada(source: str, out: str) -> None:
    """Write a Llama kept by this project with LLaDA's own config and weight names, for LLaDA's own code.

    Raises:
        ValueError: LLaDA's code has no layer for something in this model.
    """
    folder = fresh_folder(out)
    model = load_whole(source)
    config = llada_from_llama(model.config) | {"torch_dtype": str(model.dtype).removeprefix("torch.")}
    if has_tokenizer(source):
        tokenizer = load_tokenizer(source)
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            config[name] = getattr(tokenizer, name) if config[name] is None else config[name]
    weights = {rename(name, TO_LLADA): weight for name, weight in model.state_dict().items()}
    if config["weight_tying"]:
        del weights["model.transformer.ff_out.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_tokenizer(source, folder)
    tokenizer_config = folder / "tokenizer_config.json"
    if tokenizer_config.exists():  # LLaDA's code runs on Transformers 4, which knows the class by its older name
        fields = json.loads(tokenizer_config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        tokenizer_config.write_text(json.dumps(fields, indent=2) + "\n")


def a2d(
    source: str, out: str, mask_token: str = "<|mask|>", keep_shift: bool = False, plain_chat_template: bool = False
) -> None:
    """Turn an autoregressive decoder into a masked diffusion model, ready for SFT.

    Attention goes both ways and `mask_token`, added where the tokenizer lacks it, starts as the mean of all tokens.

    Args:
        mask_token: A spare token of the tokenizer, or a new name.
        keep_shift: Go on predicting the next position, as Dream does (arXiv 2508.15487), instead of learning to
            predict the masked one; the rest of the project sees no difference.
        plain_chat_template: As in `load_tokenizer`.

    Raises:
        ValueError: The checkpoint is not a decoder, or already has a mask token.
    """
    folder = fresh_folder(out)
    model = load_whole(source)
    config = model.config
    if not is_decoder(config) or getattr(config, "mask_token_id", None) is not None:
        raise ValueError(f"{source} is a masked model already, not an autoregressive decoder")
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", trust_remote_code=False)
    rows = model.get_input_embeddings().num_embeddings
    known = min(rows, len(tokenizer))  # rows beyond the tokenizer are padding
    tokenizer.add_special_tokens({"mask_token": mask_token})
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config.mask_token_id = tokenizer.mask_token_id
    tables = {id(t.weight): t.weight for t in (model.get_input_embeddings(), model.get_output_embeddings())}
    for table in tables.values():
        set_mean_rows(table.data, known, [config.mask_token_id, *range(rows, len(table))])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None and plain_chat_template:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    config.pad_token_id = tokenizer.pad_token_id
    if keep_shift:
        config.predicts_next_token = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def set_mean_rows(table: Tensor, known: int, new: list[int]) -> None:
    """Set the `new` rows of `table` (vocab, hidden) to the mean of the others among its first `known` rows."""
    others = torch.tensor([row for row in range(known) if row not in new], device=table.device)
    table[new] = table[others].float().mean(0).to(table.dtype)
