"""Evaluation with tools: a completion is an episode, each turn of which joins the batch like a new problem."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Generator

from d1.eval.completions import Prompt, Rows, SingleTurn, generator_of
from d1.eval.flags import EvalRun, StreamFlags
from d1.models.kinds import require_masks
from d1.models.tokenizer import end_ids, first_end
from d1.runs.turns import TurnFlags, TurnSettings
from d1.sampling import Rollout
from d1.sampling.loop import Stops
from d1.sampling.passes import KVCacheRows
from d1.sampling.settings import SamplingSettings, refuse_scdd, sampling_settings
from d1.tools.calls import Functions, Message
from d1.tools.functions import load_tools
from d1.tools.turns import Episode, Toolbox


def tools_of(
    flags: TurnFlags, sampling: SamplingSettings, tokenizer: Any, config: Any, template: dict[str, Any] | None = None
) -> tuple[Toolbox, dict[str, Callable[..., Any]]]:
    """What the turns of an evaluation share, and its tools by name; without tools, nothing reads the first. ValueError
    if tools are given and the model of this `config` has no mask token, its vocabulary cannot write a call, or the
    sampler has no turns. `template`: arguments of the chat template."""
    if flags.tools:
        require_masks(config, "a run with tools")
        refuse_scdd(sampling, "a run with tools")
    settings = TurnSettings.from_attributes(flags, sampling.gen_length, config)
    functions = {tool.__name__: tool for tool in load_tools(flags.tools or ())}
    toolbox = Toolbox(tokenizer, end_ids(tokenizer), settings, flags.tool_format, template)
    if functions:
        toolbox.check_calls(functions)
    return toolbox, functions


class Episodes(SingleTurn):
    """How completions are made with `--tools`: prompts tell about the tools, and a completion has several turns."""

    def __init__(self, args: EvalRun, tokenizer: Any, config: Any) -> None:
        super().__init__(args, tokenizer)
        sampling = sampling_settings(args)
        self.toolbox, self.functions = tools_of(args, sampling, tokenizer, config, args.chat_template_kwargs)

    def add_instructions(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Mapping[str, Any]]:
        return self.toolbox.add_tool_instructions(messages, self.functions)

    def rows(self, prompts: Iterable[Prompt], ends: Sequence[int]) -> Rows:
        return EpisodeRows(self.args, self.tokenizer, prompts, ends, self.toolbox, self.functions)


Row = tuple[Prompt, int, Episode, list[int]]  # a problem, its number, its episode, and its passes and tokens so far


class EpisodeRows(Rows):
    """The rows of a stream: those whose next turn waits, then new problems."""

    def __init__(
        self,
        args: StreamFlags,
        tokenizer: Any,
        prompts: Iterable[Prompt],
        ends: Sequence[int],
        toolbox: Toolbox,
        functions: Functions,
    ) -> None:
        super().__init__(args, tokenizer, prompts, ends)
        self.toolbox = toolbox
        self.functions = functions
        self.episodes: dict[int, tuple[Episode, list[int]]] = {}  # by the number of a row in the stream
        self.waiting: deque[Row] = deque()

    def __next__(self) -> tuple[list[int], Generator, Stops | None, KVCacheRows | None]:
        if self.waiting:
            prompt, number, episode, costs = self.waiting.popleft()
        else:
            number, prompt = next(self.prompts)
            episode = Episode(prompt.messages, prompt.ids, self.functions)
            costs = [0, 0]
        self.episodes[self.count] = episode, costs
        self.add_row(prompt, number)
        turn = len(episode.turns)
        generator = generator_of(self.args, prompt, turn)
        return episode.next_ids, generator, self.toolbox.stop_of(turn), self.toolbox.cache_rows_of(episode)

    def finish(self, numbers: Sequence[int], sampled: Rollout) -> list[tuple[int, dict[str, Any]]]:
        """Adds a turn to the episode of each row and makes its calls. Returns the entries of those that have ended."""
        canvases = sampled.ids[:, -self.sampling.gen_length :].tolist()
        passes = sampled.passes.tolist()
        tokens = sampled.forward_tokens.tolist()
        entries = []
        for row, number in enumerate(numbers):
            prompt, problem = self.at_work.pop(number)
            episode, costs = self.episodes.pop(number)
            costs = [costs[0] + passes[row], costs[1] + tokens[row]]
            calls = self.toolbox.append_turn(episode, canvases[row])
            if calls:
                self.toolbox.append_results(episode, calls, at=[self.args.seed, prompt.index, prompt.sample])
            if episode.end is None:
                self.waiting.append((prompt, problem, episode, costs))
            else:
                entries.append((problem, self.entry(prompt, episode, costs)))
        return entries

    def entry(self, prompt: Prompt, episode: Episode, costs: Sequence[int]) -> dict[str, Any]:
        """The journal's entry of an episode that has ended."""
        return {
            "index": prompt.key,
            "generations": self.tokenizer.decode(episode.turns[-1].kept),
            "text": episode.messages[-1]["content"],
            "tokens": sum(first_end(turn.kept, self.toolbox.ends) for turn in episode.turns),
            "forward_passes": costs[0],
            "forward_tokens": costs[1],
            "turns": len(episode.turns),
            "calls": episode.calls,
            "failed_calls": episode.failed,
            "end": episode.end,
            "messages": episode.messages,
        }
