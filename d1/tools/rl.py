"""RL with tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from d1.models.tokenizer import end_ids
from d1.rl.checks import check_episodes
from d1.rl.config import DiffuGRPOConfig
from d1.rl.stage import Tools
from d1.tools.calls import Message
from d1.tools.functions import load_tools
from d1.tools.turns import Toolbox


class RunTools(Tools):
    """The tools of a run with `--tools`, before it has a trainer. ValueError if there is no such tool, or if the
    vocabulary cannot write a call of it."""

    def __init__(self, args: DiffuGRPOConfig, tokenizer: Any, config: Any) -> None:
        check_episodes(args, has_rollout_func=False, environments=None)
        self.functions = load_tools(args.tools or ())
        self.by_name = {tool.__name__: tool for tool in self.functions}
        self.toolbox = Toolbox(tokenizer, end_ids(tokenizer), args.turn_settings(config), args.tool_format)
        self.toolbox.check_calls(self.by_name)

    def add_instructions(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Mapping[str, Any]]:
        """A prompt as the model gets it, and options for its chat template."""
        return self.toolbox.add_tool_instructions(messages, self.by_name)
