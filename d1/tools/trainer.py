"""RL with tools: each completion is an episode of up to `max_turns` turns, each on a canvas of its own.

`EpisodeTrainer` is the trainer of runs with `tools` or `environment_factory`. It differs from `DiffuGRPOTrainer` where
completions become rows. *Prompts* tell the model about its tools. *Episodes* are sampled turn by turn (`turns.py`).
TRL rewards an episode as one completion. *Rows* of the loss are then its turns: an episode's advantage, rewards and
place in the loss are those of each turn, and its results and headers are prompt.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor

from d1.masking import keyed_generator
from d1.models.kinds import require_masks
from d1.rl.batch import Batch, RankView, RolloutRecord, count_scored_tokens, record_and_costs
from d1.rl.checks import check_episodes
from d1.rl.config import DiffuGRPOConfig
from d1.rl.trainer import DiffuGRPOTrainer
from d1.tools.functions import check_tools
from d1.tools.turns import ENDS, Episode, Results, Toolbox, ends_of


class EpisodeTrainer(DiffuGRPOTrainer):
    """`DiffuGRPOTrainer` for episodes of several turns with tools.

    Attributes:
        rows_per_completion: the largest number of turns; an episode with fewer has empty rows.
        episodes: of the current rollout.
        messages: the prompts of the current rollout, of chat messages, with what tells about tools.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.episodes: list[Episode] = []
        self.messages: list = []
        self.resumed = False
        self.results_log: Results | None = None
        with disable_trl_tool_checks():
            super().__init__(*args, **kwargs)
        require_masks(self.model.config, "a run with tools")
        check_tools(self.tools)
        limits = self.args.turn_settings(self.model.config)
        self.rows_per_completion = limits.max_turns
        self.toolbox = Toolbox(
            self.text_tokenizer,
            self.eos_token_ids,
            limits,
            form=self.args.tool_format,
            options=self.args.chat_template_kwargs,
        )
        if self.environment_factories is None:  # otherwise each row has the tools of its environment
            self.toolbox.check_calls({tool.__name__: tool for tool in self.tools})

    def check_completions(self, args: DiffuGRPOConfig, has_rollout_func: bool, environments: Any) -> None:
        check_episodes(args, has_rollout_func, environments)

    # --- Prompts ------------------------------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        groups = [(prompt, len(list(group))) for prompt, group in groupby(prompts)]
        if self.environment_factories is not None:  # the rows of a group may have different environments
            groups = [(prompt, 1) for prompt in prompts]
        groups = [(self.add_instructions(prompt, row), count) for row, (prompt, count) in enumerate(groups)]
        self.messages = []
        for prompt, count in groups:
            self.messages += [prompt] * count
        return self.tokenized_groups(groups)

    def add_instructions(self, prompt: list, row: int) -> list:
        """A prompt that tells the model about the tools of a row, where the chat template does not."""
        functions = self.tools_of(row)
        self.toolbox.check_calls(functions)
        return self.toolbox.add_tool_instructions(prompt, functions)[0]

    def tools_of(self, row: int) -> dict[str, Callable[..., Any]]:
        """The tools of a row of the current rollout, by name: those of the run, and the methods of its environment."""
        if self.environment_factories is None:
            return {tool.__name__: tool for tool in self.tools}
        return {**self._sync_tool_dicts[row], **self._async_tool_dicts[row]}

    def fit_prompts(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """The prompts, which must not be longer than `max_prompt_length`: a cut would remove what tells about tools."""
        max_length = self.args.max_prompt_length
        longest = max(len(ids) for ids in prompt_ids)
        if longest > max_length:
            raise ValueError(f"a prompt with its tools has {longest} tokens: raise --max_prompt_length {max_length}")
        return prompt_ids

    # --- Episodes -----------------------------------------------------------------------------------------------------

    def rollout(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], RolloutRecord]:
        """Runs one episode per prompt (`self.episodes`). Returns the first turns, and the record of all turns."""
        started = time.perf_counter()
        record, costs = self.run_episodes(prompt_ids)
        self.log_rollout(started, record, costs)
        self.log_episodes(self.episodes)
        return [episode.turns[0].kept for episode in self.episodes], record

    def run_episodes(self, prompt_ids: list[list[int]]) -> tuple[RolloutRecord, dict[str, float]]:
        """Runs one episode per prompt (`self.episodes`). Returns the record of the canvases of all turns, with their
        prompts: (episodes x turns, ...), as `flatten_episodes` takes it; and what sampling took per episode, on
        average."""
        count = len(prompt_ids)
        turns = self.rows_per_completion
        keys = self.turn_keys("rollout", count)
        first_row = self.first_row(count)
        self.episodes = []
        for row, (messages, ids) in enumerate(zip(self.messages, prompt_ids, strict=True)):
            self.episodes.append(Episode(messages, ids, self.tools_of(row), first_row + row))
        parts: list[tuple[list[int], Batch]] = []
        costs: dict[str, float] = {}

        def sample(rows: list[int], turn: int) -> list[list[int]]:
            ids, mask = self.left_pad([self.episodes[row].next_ids for row in rows])
            row_keys = [keys[row * turns + turn] for row in rows]
            cache_rows = [self.toolbox.cache_rows_of(self.episodes[row]) for row in rows]
            sampled = self.sample(ids, mask, row_keys, self.toolbox.stop_of(turn), cache_rows)
            record, turn_costs, _ = record_and_costs(sampled)
            for name, value in turn_costs.items():  # per episode
                costs[name] = costs.get(name, 0.0) + value * len(rows) / count
            self.source.verify({"prompt_ids": ids, "prompt_mask": mask, **record}, sampled, row_keys)

            # The rows of ended episodes were sampled only to keep processes in step.
            active = [index for index, row in enumerate(rows) if self.episodes[row].end is None]
            active_rows = [rows[index] for index in active]
            parts.append((active_rows, {name: values[active] for name, values in cast("Batch", record).items()}))
            return record["canvas_ids"].tolist()  # this waits for the device

        def any_process(has_rows: bool) -> bool:
            if self.accelerator.num_processes == 1:
                return has_rows
            return bool(self.accelerator.gather(torch.tensor(has_rows, device=self.accelerator.device)).any())

        self.toolbox.run_episodes(
            self.episodes,
            sample,
            any_process=any_process,
            all_rows=self.samples_in_step,
            log=self.open_results_log(),
            at=self.key("rollout"),
        )
        record = stack_turns(parts, count, turns, self.eos_token_ids[0])
        record |= self.prompts_of_turns(self.episodes)
        return cast("RolloutRecord", record), costs

    def turn_keys(self, purpose: str, episodes: int) -> list[tuple[int, ...]]:
        """The key of each turn of each episode: that of its row, and after the first turn its number. It does not
        depend on the episodes that are still at work."""
        keys: list[tuple[int, ...]] = []
        for row_key in self.row_keys(purpose, episodes):
            keys.append(row_key)
            for turn in range(1, self.rows_per_completion):
                keys.append((*row_key, turn))
        return keys

    def generators(self, purpose: str, rows: int) -> list[torch.Generator]:
        """One generator per row: per turn of each episode."""
        device = "cpu" if purpose == "views" else self.accelerator.device
        keys = self.turn_keys(purpose, rows // self.rows_per_completion)
        return [keyed_generator(*key, device=device) for key in keys]

    def prompts_of_turns(self, episodes: Sequence[Episode]) -> Batch:
        """The prompts and completions of all turns, as TRL pads them; `maskable` and `turn`. An empty turn has the
        first prompt, and no token that counts."""
        turns = self.rows_per_completion
        prompts: list[list[int]] = []
        completions: list[list[int]] = []
        maskable_lengths: list[int] = []
        for episode in episodes:
            first_prompt = episode.turns[0].prompt_ids
            for turn in episode.turns:
                prompts.append(turn.prompt_ids)
                completions.append(turn.kept)
                maskable_lengths.append(len(first_prompt))
            for _ in range(turns - len(episode.turns)):
                prompts.append(first_prompt)
                completions.append([])
                maskable_lengths.append(0)
        prompt_ids, prompt_mask = self.left_pad(prompts)
        completion_ids, completion_mask = self.right_pad(completions)

        # Maskable are the tokens of the first prompt; positions are counted without the padding on the left.
        device = prompt_ids.device
        width = prompt_ids.shape[1]
        positions = torch.arange(width, device=device) - (width - prompt_mask.sum(-1, keepdim=True))
        lengths = torch.tensor(maskable_lengths).to(device)
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "maskable": prompt_mask.bool() & (positions < lengths.unsqueeze(1)),
            "turn": torch.arange(len(prompts), device=device) % turns,
        }

    def open_results_log(self) -> Results | None:
        """The results of tools, with `log_tool_results`, in training: one file per process."""
        if not self.args.log_tool_results or self.mode == "eval":
            return None
        if self.results_log is None:
            file = f"tool_results_rank{self.accelerator.process_index}.jsonl"
            self.results_log = Results(Path(str(self.args.output_dir)) / file, resume=self.resumed)
        return self.results_log

    def log_episodes(self, episodes: Sequence[Episode]) -> None:
        """Logs turns per episode and the shares of the reasons why episodes ended, over all processes."""
        turns = sum(len(episode.turns) for episode in episodes)
        counts = torch.tensor([len(episodes), turns, *ends_of(episodes).values()], device=self.accelerator.device)
        all_counts = self.accelerator.gather(counts.unsqueeze(0))  # (processes, counts)
        total_episodes, total_turns, *total_ends = all_counts.sum(0).tolist()
        self.log_metric("tools/turns", total_turns / total_episodes)
        for name, count in zip(ENDS, total_ends, strict=True):
            self.log_metric(f"tools/end_{name}", count / total_episodes)

    def load_extra(self, folder: Path) -> None:
        super().load_extra(folder)
        self.resumed = True

    # --- Rows of the loss ---------------------------------------------------------------------------------------------

    def _tool_call_loop(
        self, prompts: list, prompt_ids: list, completion_ids: list, completions: list, *args: Any
    ) -> tuple:
        """The episodes that `rollout` has run: TRL's own loop samples after a completion, not on a canvas, and numbers
        only the rows that have not ended."""
        for episode, environment in zip(self.episodes, self.environments or (), strict=False):
            if episode.hung:  # its method may still run, so no other row gets this environment
                for pool in self._environment_pool.values():
                    pool[:] = [pooled for pooled in pool if pooled is not environment]

        # As TRL's loop returns them.
        tool_mask = [episode.sampled for episode in self.episodes]
        messages = [episode.messages for episode in self.episodes]
        ids = [episode.ids for episode in self.episodes]
        logps = None
        calls = sum(episode.calls for episode in self.episodes)
        failed_calls = sum(episode.failed for episode in self.episodes)
        images: list[list] = [[] for _ in ids]
        return tool_mask, messages, ids, logps, calls, failed_calls, images

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        batch = super()._generate_and_score_completions(inputs)
        self.episodes = []
        return batch

    def row_record(self) -> Batch:
        """Nothing yet: the record is of turns, and TRL's rows are episodes."""
        return {}

    def complete_rows(self, batch: Batch) -> None:
        """Changes the advantages of episodes, and makes their turns the rows."""
        ranks = self.rank_view(batch)
        self.source.before_views(batch, ranks)
        self.change_advantages(batch, ranks)
        batch |= flatten_episodes(batch, {**self.record}, self.rows_per_completion, ranks)
        batch.pop("tool_mask", None)
        self.choose_scored_tokens(batch, self.rank_view(batch))


def flatten_episodes(batch: Batch, record: Batch, turns: int, ranks: RankView) -> Batch:
    """A batch of episodes, one row each, as one of their turns, for the loss. An episode's advantage, rewards and place
    in the loss are those of each of its turns; its results and headers are prompt.

    Args:
        record: of the turns, (episodes x turns, ...) each: the record of the canvases, `prompt_ids`, `prompt_mask`,
            `completion_ids`, `completion_mask`, `maskable` and `turn`.
    """
    flat = dict(record)
    for name in ("advantages", "completion_is_right", "completion_reward"):
        if name in batch:
            flat[name] = batch[name].repeat_interleave(turns, 0)

    # The turns of an episode that TRL has excluded from the loss are excluded, too.
    is_counted = batch["completion_mask"].any(-1).repeat_interleave(turns, 0)
    flat["completion_mask"] = record["completion_mask"] * is_counted.unsqueeze(1)
    flat["num_items_in_batch"] = count_scored_tokens(flat, ranks)
    return flat


def stack_turns(parts: Sequence[tuple[Sequence[int], Batch]], episodes: int, turns: int, end: int) -> Batch:
    """The records of turns, each of the episodes with these numbers, as one: (episodes x turns, ...). An episode
    without a turn has a canvas that is not scored: `end` everywhere, which no step revealed."""
    first_record = parts[0][1]
    fill_values = {"canvas_ids": end, "reveal_steps": -1}
    stacked: dict[str, Tensor] = {}
    for name, first_values in first_record.items():
        values = first_values.new_full((episodes, turns, *first_values.shape[1:]), fill_values.get(name, 0))
        for turn, (rows, record) in enumerate(parts):
            values[torch.tensor(rows, dtype=torch.long, device=values.device), turn] = record[name]
        stacked[name] = values.flatten(0, 1)
    return stacked


@contextlib.contextmanager
def disable_trl_tool_checks() -> Iterator[None]:
    """Inside, TRL's constructor takes tools with any chat template: the formats of calls are `d1/tools/calls.py`'s."""
    replacements: dict[str, Callable[..., Any]] = {
        "supports_tool_calling": lambda tokenizer: True,
        "is_chat_template_prefix_preserving": lambda tokenizer: True,
        "add_response_schema": lambda tokenizer: tokenizer,
        "is_jmespath_available": lambda: True,
    }
    originals = {name: getattr(trl_grpo, name) for name in replacements if hasattr(trl_grpo, name)}
    for name in originals:
        setattr(trl_grpo, name, replacements[name])
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(trl_grpo, name, function)
