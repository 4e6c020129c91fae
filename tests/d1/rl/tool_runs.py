"""Runs of RL with turns, for this process and for others: a tiny model whose random texts often hold a call.

A call is any text that ends with "a"; the tiny tokenizer decodes with a space between tokens.
"""

import json
import os
import signal
from pathlib import Path

import torch

from d1.models import load_model, load_tokenizer
from d1.rl.config import DiffuGRPOConfig
from d1.tools.calls import FORMATS, CallFormat, read_plain, write_plain
from tests import forks
from tests.tiny_grpo import SETTINGS, Recorded, rows

CALLS = CallFormat(" ", "a", read_plain, write_plain, "{result}")
EPISODES = 12
TURNS = SETTINGS | {
    "per_device_train_batch_size": EPISODES,
    "max_turns": 2,
    "tool_format": "test",
    "max_prompt_length": 400,
    "max_completion_length": 16,
    "diffusion_steps": 8,
    "temperature": 1.5,
    "loss_type": "dapo",
    "learning_rate": 0.01,
}


def repeat(text: str) -> str:
    """The end of a text again.

    Args:
        text: The text.
    """
    return "z" + text.replace(" ", "")[-3:]


def last_letters(completions, letter, **columns):
    """A number for the last message, and one for calls, so that groups differ."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(map(ord, text)) % 97 / 97 + 0.2 * len(said) for text, said in zip(texts, completions, strict=True)]


def make_turns(model_dir, folder, tool=repeat, model=None, cls=Recorded, environment_factory=None, **changes):
    FORMATS["test"] = CALLS
    trainer = cls(
        model=load_model(str(model_dir)) if model is None else model,
        reward_funcs=last_letters,
        args=DiffuGRPOConfig(**({"output_dir": str(folder)} | TURNS | changes)),
        train_dataset=rows(),
        eval_dataset=rows(4),
        processing_class=load_tokenizer(str(model_dir)),
        tools=[tool] if tool else None,
        environment_factory=environment_factory,
    )
    trainer.toolbox.add_tool_instructions = lambda prompt, functions: (list(prompt), {})  # as a run without tools
    return trainer


def run_turns(model_dir, folder, kill_at="0", chance="", launcher="ddp"):
    """A run that writes its rollouts and model into `folder`. It kills itself before tool call number `kill_at`. With
    `chance`, a result depends on how many calls were made before, in any process, and results are logged."""
    torch.set_num_threads(1)
    folder, processes = Path(folder), int(os.environ.get("WORLD_SIZE", "1"))
    folder.mkdir(parents=True, exist_ok=True)
    if launcher == "fsdp2" and processes > 1:
        forks.use_fsdp2()
    made = folder / "calls"

    def tool(text: str) -> str:
        """A letter.

        Args:
            text: The text.
        """
        number = len(made.read_text().split()) if made.exists() else 0
        if number + 1 == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)
        with made.open("a") as file:
            file.write("1\n")
        return "bcdefgh"[number % 7] if chance else repeat(text)

    options = {"per_device_train_batch_size": EPISODES // processes, "max_steps": 5, "lr_scheduler_type": "constant"}
    options |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}  # Adam enlarges differences in rounding
    options |= {"save_strategy": "steps", "save_steps": 1, "log_tool_results": bool(chance), "max_turns": 3}
    options |= {"ddp_backend": "gloo"} if processes > 1 else {}
    options |= {} if launcher == "ddp" else {"eos_stop": False}  # which split weights cannot have
    trainer = make_turns(model_dir, folder, tool, **options)
    trainer.train(resume_from_checkpoint=bool([*folder.glob("checkpoint-*")]))
    trainer.save_model(str(folder))
    if trainer.accelerator.is_main_process:
        (folder / "rollouts.json").write_text(json.dumps(trainer.rollouts))
        state = trainer.accelerator.num_processes, trainer.accelerator.distributed_type.value
        (folder / "processes.json").write_text(json.dumps([*state, trainer.weights_are_split]))
