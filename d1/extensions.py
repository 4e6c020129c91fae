"""What the core takes from the rooms around it, when the flags or the arguments of a run ask for it.

The core (masking, models, sampling, scoring, tasks, sft, rl, eval, runs) imports no other room. This is its only door.
A name is imported from its module when it is first used, so that a run that asks for nothing here imports and executes
nothing of these rooms. `tests/d1/test_closed_core.py` checks both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.commands.rl_memory import has_room_for_copy as has_room_for_copy
    from d1.report import ShowProblems as ShowProblems
    from d1.report import write_report as write_report
    from d1.sandbox import SandboxError as SandboxError
    from d1.serve.ahead import PrefetchedRollouts as PrefetchedRollouts
    from d1.serve.rollouts import ServerRollouts as ServerRollouts
    from d1.serve.user import UserRollouts as UserRollouts
    from d1.tools.calls import FORMATS as FORMATS
    from d1.tools.evaluation import Episodes as Episodes
    from d1.tools.functions import TOOLS as TOOLS
    from d1.tools.functions import load_tools as load_tools
    from d1.tools.rl import RunTools as RunTools
    from d1.tools.trainer import EpisodeTrainer as EpisodeTrainer

HOMES = {
    # RL of an adapter on 16-bit weights on a GPU, unless --merged_rollouts says what to do
    "has_room_for_copy": "commands.rl_memory",
    # --report true, in RL
    "ShowProblems": "report",
    "write_report": "report",
    # A task's error, in evaluation
    "SandboxError": "sandbox",
    # --rollout_mode server and --rollout_staleness in RL, and the trainer's `rollout_func`
    "PrefetchedRollouts": "serve.ahead",
    "ServerRollouts": "serve.rollouts",
    "UserRollouts": "serve.user",
    # --tools, in RL and evaluation, and the trainer's `tools` and `environment_factory`
    "EpisodeTrainer": "tools.trainer",
    "Episodes": "tools.evaluation",
    "FORMATS": "tools.calls",
    "TOOLS": "tools.functions",
    "RunTools": "tools.rl",
    "load_tools": "tools.functions",
}
__getattr__ = lazily("d1", HOMES)
