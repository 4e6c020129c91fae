"""The only module that uses private names of Transformers, Accelerate and torch: for each, the version checked, and
when to delete it. Names that are public but have no stable home are imported here, too."""

# ruff: noqa: E402
from __future__ import annotations

from d1.versions import check_versions

check_versions()  # first, because other versions may lack what is imported next

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import fsdp_utils
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from torch.serialization import register_package
from transformers import PreTrainedModel, TrainingArguments, modeling_utils
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps
from transformers.core_model_loading import WeightConverter as WeightConverter
from transformers.masking_utils import eager_mask as eager_mask
from transformers.masking_utils import sdpa_mask as sdpa_mask
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.llama.modeling_llama import rotate_half as rotate_half
from transformers.utils import cached_file

from d1.files import read_object

try:
    from transformers.core_model_loading import Split as Split
except ImportError:  # before Transformers 5.20. Delete this, and the class, once 5.20 is the oldest version

    class Split(ConversionOps):  # type: ignore[no-redef]
        """Cuts a weight into one piece for each target, as long as the target's parameter."""

        def __init__(self, dim: int) -> None:
            self.dim = dim

        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
        ) -> dict[str, Any]:
            (weights,) = input_dict.values()
            whole = weights[0] if isinstance(weights, list) else weights
            sizes = []
            for target in target_patterns:
                name = kwargs["full_layer_name"].replace(target_patterns[0], target)
                sizes.append(kwargs["model"].get_parameter(name).shape[self.dim])
            pieces = whole.split(sizes, dim=self.dim)
            return {target: piece.contiguous() for target, piece in zip(target_patterns, pieces, strict=True)}

        @property
        def reverse_op(self) -> ConversionOps:
            return Concatenate(self.dim)


def tag_storage(storage: Any) -> str | None:
    return None


def restore_numbered_cpu(storage: Any, location: str) -> Any:
    if location.startswith("cpu:"):
        return storage
    return None


# Transformers 5.17 reads the optimizer of several processes without a GPU to "cpu:0", which torch does not know. Delete
# this once 5.18 is the oldest version.
register_package(9, tag_storage, restore_numbered_cpu)


def replace_adapter_state(function: Any, **options: Any) -> Any:
    """`function` of Accelerate with torch's own state of the trained weights, whole, in place of PEFT's."""

    def with_options(*args: Any, adapter_only: bool = False, sd_options: Any = None) -> Any:
        if adapter_only and sd_options is not None and sd_options.full_state_dict:
            adapter_only = False
            sd_options = replace(sd_options, **options)
        return function(*args, adapter_only=adapter_only, sd_options=sd_options)

    return with_options


# Before Accelerate 1.15, a run of LoRA under FSDP2 that resumes leaves out the checkpoint's adapter without an error.
# Delete this once 1.15 is the oldest version.
if Version(version("accelerate")) < Version("1.15"):
    private: Any = fsdp_utils
    private._get_model_state_dict = replace_adapter_state(private._get_model_state_dict, ignore_frozen_params=True)
    private._set_model_state_dict = replace_adapter_state(private._set_model_state_dict, strict=False)
# Before torch 2.13, a layer under FSDP2 stays split when a second pass of the same backward pass is recomputed (`score`
# with several views). Delete this once 2.13 is the oldest version.
if Version(torch.__version__) < Version("2.13") and torch.distributed.is_available():
    fsdp: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_state")
    original_pre_forward = fsdp.FSDPState._pre_forward

    def pre_forward(state: Any, module: Any, *args: Any) -> Any:
        if state._training_state == fsdp.TrainingState.PRE_BACKWARD:
            module.unshard()
        return original_pre_forward(state, module, *args)

    fsdp.FSDPState._pre_forward = pre_forward
# The argument of a decoder's forward that is its cache; "past_key_values" before Transformers 5.24. Delete the other
# name once 5.24 is the oldest version.
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"
# The setting of Trainer for gradient checkpointing; "gradient_checkpointing" before Transformers 5.23. Likewise.
RECOMPUTE = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
PACKED = "packed_"  # prefix of a kernel's name: the same kernel, for rows of several texts
READ_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"
READING = threading.Lock()
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors names them


def needs_copy(path: str, dtype: Any, device: Any) -> bool:
    """Whether weights loaded as `dtype` on `device` are copies, not the mapped file of a local folder itself."""
    first = next(stored_weights(path), None)
    if dtype == "auto" or first is None:
        return False
    return device is not None or str(dtype).removeprefix("torch.") != str(first[1]).removeprefix("torch.")


def stored_weights(path: str) -> Iterator[tuple[str, torch.dtype | None, int, Path]]:
    """Name, dtype (None: not one of `STORED`), number of elements and file of each weight in a local folder; ValueError
    if a file is damaged."""
    for name, dtype, count, file_path in stored_types(path):
        yield name, STORED.get(dtype), count, file_path


def stored_types(path: str) -> Iterator[tuple[str, str, int, Path]]:
    """`stored_weights` with the name that safetensors has for each dtype."""
    for file_path in weight_files(Path(path)):
        try:
            opened = safe_open(file_path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file_path} is damaged or cut off ({error}): copy or download it again") from error
        with opened as file:
            for name in list(file.keys()):
                weight = file.get_slice(name)
                yield name, weight.get_dtype(), math.prod(weight.get_shape()), file_path


def weight_files(folder: Path) -> list[Path]:
    """The files of safetensors that Transformers reads in a local folder: the single one, else those of the index, else
    all. A folder may hold others, such as an optimizer's."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted({*read_object(index)["weight_map"].values()})
        return [folder / name for name in names if (folder / name).is_file()]
    return sorted(folder.glob("*.safetensors"))


def checkpoint_dtype(path: str) -> torch.dtype | str:
    """The dtype of most of a checkpoint's numbers; "auto" if it is not a local folder of safetensors. Transformers' own
    "auto" is the dtype in `config.json`, which the files may contradict, or that of the first weight, which may be a
    router's bias in another precision."""
    elements: Counter[torch.dtype] = Counter()
    for _, dtype, count, _ in stored_weights(path):
        if dtype is not None:
            elements[dtype] += count
    if not elements:
        return "auto"
    return elements.most_common(1)[0][0]


@contextmanager
def reading_weights(copies: bool, in_order: bool) -> Iterator[None]:
    """If weights are copied (`copies`), make Transformers 5.23 read files piece by piece: a mapped file would stay in
    memory next to the weights that were converted from it. `in_order`: read each weight only when it is needed, or
    threads read ahead while experts are stacked, up to the whole checkpoint. Delete this once `from_pretrained` takes
    both, safetensors' `backend` and the environment variable, as arguments. Threads read one after another, because
    they share both.
    """
    library: Any = modeling_utils

    def open_without_mapping(*args: Any, **kwargs: Any) -> Any:
        kwargs["backend"] = "pread"
        return original_safe_open(*args, **kwargs)

    with READING:
        original_safe_open = library.safe_open
        original_order = os.environ.get(READ_IN_ORDER)
        if in_order:
            os.environ[READ_IN_ORDER] = "1"
        if copies:
            library.safe_open = open_without_mapping
        try:
            yield
        finally:
            library.safe_open = original_safe_open
            if original_order is None:
                os.environ.pop(READ_IN_ORDER, None)
            else:
                os.environ[READ_IN_ORDER] = original_order


@contextmanager
def converting(model_type: str, converters: Callable[[], list[Any]] | None) -> Iterator[None]:
    """Make Transformers 5.23 apply `converters()`, before its own, when it reads a model of this type. Delete this once
    `from_pretrained` takes converters as it takes a `key_mapping`."""
    library_converters = get_checkpoint_conversion_mapping(model_type)
    if converters is None or library_converters is None:
        yield
        return
    register_checkpoint_conversion_mapping(model_type, [*converters(), *library_converters], overwrite=True)
    try:
        yield
    finally:
        register_checkpoint_conversion_mapping(model_type, library_converters, overwrite=True)


def attention_kernel(config: Any) -> str | None:
    """The kernel that attention runs on: "sdpa", "eager", "flash_attention_2"..., without the prefix for packed rows.
    Transformers 5.23 keeps it as `_attn_implementation`. Delete this once the config has a public name for it."""
    kernel = getattr(config, "_attn_implementation", None)
    return kernel and kernel.removeprefix(PACKED)


def recomputes_activations(model: Any) -> bool:
    """Whether gradient checkpointing is on. `is_activation_checkpointing` was called `is_gradient_checkpointing` before
    Transformers 5.23. Delete this once 5.23 is the oldest version."""
    if hasattr(type(model), "is_activation_checkpointing"):
        return bool(model.is_activation_checkpointing)
    return bool(model.is_gradient_checkpointing)


def takes_packed_rows(config: Any) -> bool:
    """Whether attention runs on a kernel that `d1.models.packing` registered."""
    return (getattr(config, "_attn_implementation", None) or "").startswith(PACKED)


def forget_renaming(model: PreTrainedModel) -> None:
    """Make `save_pretrained` write the names of the model's class, not those of the checkpoint it was read from.
    Transformers 5.23 keeps a `key_mapping` that it used as `_weight_conversions`, and reverses it when it saves. Delete
    this once `save_pretrained` has an argument for it."""
    vars(model).pop("_weight_conversions", None)


def file_of(folder: str, name: str, *, needs_answer: bool = True) -> str | None:
    """The path of a file in a folder or of a hub name (also without a network: in its cache); None if it has none or,
    unless that `needs_answer`, the hub does not answer. `cached_file` of Transformers 5.23 raises for a missing file,
    unless arguments with an underscore say otherwise. Delete this once it, or huggingface_hub, has public ones."""
    return cached_file(  # type: ignore[no-any-return]
        folder,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=needs_answer,
    )


def has_file(folder: str, name: str) -> bool:
    return file_of(folder, name) is not None


if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the class that inherits from this one has Trainer as another base


class TrainerHooks(_Trainer):
    """The private parts of Trainer (Transformers 5.23) that a trainer needs, under public names.

    It comes before Trainer among the bases of a class. It overrides, sets and reads:

    - `_get_train_sampler` (overridden): calls `train_sampler`, because Trainer does not take a sampler. Delete this
      once it does, or has a public hook.
    - `_save_checkpoint` (overridden): runs inside `saving_checkpoint`, because callbacks are only called
      after it.
    - `_load_optimizer_and_scheduler` (overridden): stores the checkpoint in `resumed_from`, because callbacks do not
      get it.
    - `_load_best_model` (overridden): calls `check_best` before, because Trainer reads what it finds there.
    - `_issue_warnings_after_load` (overridden): it only warns of weights that a checkpoint lacks, and warns of a tied
      head, which no checkpoint has. Delete this once Trainer raises, and for tied weights does nothing.
    - `_loss_shifts_labels` (set): Trainer assumes that decoders predict the next token, and does not count the first
      label in `num_items_in_batch`. Delete this once Trainer has an argument for it.
    - `_tr_loss`, `_total_loss_scalar`, `_globalstep_last_logged`, `_initial_global_step` (read and set): the losses so
      far, which Trainer forgets when it resumes. Delete this once they are part of its state.
    - `_prepare_inputs` (called): moves a batch to the device.
    - `_prepare_input` (overridden): under DeepSpeed, it rounds floats to the model's precision. Those of a batch here
      are times, weights and bounds of the loss, which no model reads. Delete this once Trainer has an argument for it.
    """

    resumed_from: Path | None = None
    resumed_sums: bool = False

    def train_sampler(self, dataset: Any) -> Any:
        """The sampler of training rows."""
        raise NotImplementedError

    def saving_checkpoint(self) -> AbstractContextManager[Any]:
        """The context in which a checkpoint is written, on every process."""
        raise NotImplementedError

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if train_dataset is None:
            train_dataset = self.train_dataset
        return self.train_sampler(train_dataset)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.saving_checkpoint():
            super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.resumed_from = None if checkpoint is None else Path(checkpoint)

    def check_best(self, checkpoint: Path) -> None:
        """Refuse the best checkpoint, from which the run takes its model at the end, if it is not as it was saved."""
        raise NotImplementedError

    def _load_best_model(self) -> None:
        self.check_best(Path(str(self.state.best_model_checkpoint)))
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        model: Any = self.model
        weights: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        read = {id(weight) for name, weight in weights.items() if name not in load_result.missing_keys}
        missing = [name for name in load_result.missing_keys if id(weights.get(name)) not in read]
        if missing or load_result.unexpected_keys:
            raise ValueError(
                f"the checkpoint's weights are not those of the model: missing {missing}, unexpected "
                f"{list(load_result.unexpected_keys)}"
            )

    def count_labels_of_step(self) -> None:
        """Make Trainer pass to `compute_loss` the number of labels (not -100) of the whole optimizer step, over all
        processes. ValueError if the settings leave out the other processes."""
        if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
            problem = "average_tokens_across_devices=False: the loss is a mean over the tokens or rows of all processes"
            raise ValueError(f"{problem}, so leave it out of the TrainingArguments")
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = False

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device)
        return super()._prepare_input(data)

    def on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch, moved to the device of this process."""
        return self._prepare_inputs(inputs)

    def mean_loss(self) -> float:
        """The mean loss of all steps of the run or, if a resume did not call `set_loss_sums`, of those since then."""
        # Before Transformers 5.19, the first step is not known. Delete the 0 once 5.19 is the oldest version.
        first = 0 if self.resumed_sums else getattr(self, "_initial_global_step", 0)
        return self._total_loss_scalar / max(self.state.global_step - first, 1)

    def loss_sums(self) -> dict[str, Any]:
        """The losses so far, to be saved with a checkpoint. Every process must call this."""
        return {
            "total": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            "since_then": self.accelerator.gather(self._tr_loss).view(-1).tolist(),  # of each process
        }

    def set_loss_sums(self, sums: dict[str, Any]) -> None:
        """Restore what `loss_sums` returned; to be called when training begins."""
        self.resumed_sums = True
        self._total_loss_scalar = sums["total"]
        self._globalstep_last_logged = sums["last_logged"]
        losses = sums["since_then"]
        if len(losses) == self.args.world_size:
            self._tr_loss.fill_(losses[self.args.process_index])
        else:  # another number of processes gets the mean each
            self._tr_loss.fill_(sum(losses) / len(losses))
