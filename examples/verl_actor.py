"""One update of diffu-GRPO in verl's FSDP engine, for models that need verl's Ray, FSDP2 and SGLang.

    engine = make_engine("pocket/base", Settings())  # in each process of a torch.distributed group
    metrics = update(engine, batch, Settings())

`score` replaces the model's forward pass. Sharding, micro-batches, optimizer and `ppo_loss` are verl's. Left out:
sampling (SGLang with the plugin), rewards, and verl's Ray workers. The update equals that of `examples.rl_loop`
(tests/examples/test_verl_actor.py).

verl 0.9.1 pins Transformers below 5.11, and d1 needs 5.17, so pip cannot install both: docs/engines.md says how to
install verl without its dependencies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import pad
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from d1.models import load_model
from d1.scoring import mean_field_logps
from examples.rl_loop import Settings


class CPU(PlatformCUDA):
    """A processor as verl's device: verl has none for it."""

    device_name = "cpu"
    device_module = torch.cpu

    def current_device(self) -> Any:
        return "cpu"

    def is_available(self) -> bool:
        return True


if not torch.cuda.is_available():
    set_platform(CPU())


@EngineRegistry.register(model_type="masked_diffusion", backend="fsdp2", device=["cuda", "cpu"])
class MaskedDiffusionEngine(FSDPEngineWithLMHead):
    """verl's engine for a masked diffusion model: d1 loads the model and estimates the log-probabilities."""

    def _build_module(self) -> nn.Module:
        module: Any = load_model(self.model_config.local_path, dtype=torch.float32)
        options = {"mask_token_id": self.model_config.tokenizer.mask_token_id}
        # FSDP gathers the root's weights when its forward is called, so the forward is the estimate.
        module.forward = partial(mean_field_logps, module, **options)
        return module

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> tuple[Tensor, dict]:
        """Loss and outputs of a micro-batch with `prompts`, `responses` (the whole canvas), `attention_mask` of both,
        and `prompt_noise`: the prompt tokens that this update's view hides."""
        prompts, canvas, mask = (micro_batch[name] for name in ("prompts", "responses", "attention_mask"))
        width, length = prompts.shape[1], canvas.shape[1]
        given = prompts, mask[:, :width], canvas, micro_batch["prompt_noise"]
        logps = self.module(*given, gen_length=length)
        # verl expects the log-probability of a token one position before it, in texts without padding.
        rows = zip(pad(logps, (width - 1, 1)), mask.bool(), strict=True)
        output = {"log_probs": torch.nested.as_nested_tensor([row[keep] for row, keep in rows], layout=torch.jagged)}
        loss, metrics = logps.sum() * 0, {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=output, data=micro_batch)
        kept = {name: value.detach() for name, value in output.items()}
        return loss, {"model_output": kept, "loss": loss.item(), "metrics": metrics}


def make_engine(model_path: str, s: Settings) -> Any:
    """The engine with the settings of `examples.rl_loop`, on the processes of the default group."""
    rates: dict[str, Any] = {"lr": s.learning_rate, "betas": (0.9, 0.99), "weight_decay": 0.0}
    engine = EngineRegistry.new(
        model_type="masked_diffusion",
        backend="fsdp2",
        model_config=HFModelConfig(path=model_path, override_config={"attn_implementation": "sdpa"}),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", mixed_precision={"param_dtype": "fp32"}, use_torch_compile=False
        ),
        optimizer_config=FSDPOptimizerConfig(clip_grad=s.max_grad_norm, total_training_steps=1, **rates),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def update(engine: Any, batch: dict[str, Tensor], s: Settings) -> dict[str, Any]:
    """One optimizer step with d1's objective: clipped ratio, k3, mean over tokens. (verl bounds k3 at 10.)

    Args:
        batch: the inputs of `forward_step`, and `old_log_probs`, `ref_log_prob`, `advantages`, `response_mask`
            (rows, canvas) each.
    """
    clip = {"clip_ratio": s.epsilon, "clip_ratio_low": s.epsilon, "clip_ratio_high": s.epsilon}
    clip["clip_ratio_c"] = 1e9  # no second bound for negative advantages: d1's objective has none
    penalty: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": s.beta, "kl_loss_type": "low_var_kl"}
    config = ActorConfig(strategy="fsdp2", rollout_n=s.num_generations, use_dynamic_bsz=True, **clip, **penalty)
    rows = len(batch["responses"])
    data = TensorDict({**batch, "loss_mask": batch["response_mask"]}, batch_size=rows)
    sizes = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": s.num_generations, "global_batch_size": rows}
    tensordict_utils.assign_non_tensor(data, **sizes)
    with engine.train_mode():
        return engine.train_batch(data, partial(ppo_loss, config))["metrics"]
