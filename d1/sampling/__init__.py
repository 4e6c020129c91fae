"""The reverse process: complete a prompt, or fill the hidden positions of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.sampling.infilling import fill as fill
    from d1.sampling.infilling import fill_steps as fill_steps
    from d1.sampling.infilling import infill as infill
    from d1.sampling.infilling import infill_steps as infill_steps
    from d1.sampling.loop import eos_cut as eos_cut
    from d1.sampling.record import Rollout as Rollout
    from d1.sampling.record import RolloutStart as RolloutStart
    from d1.sampling.record import Step as Step
    from d1.sampling.rollouts import generate as generate
    from d1.sampling.rollouts import rollout as rollout
    from d1.sampling.rollouts import rollout_steps as rollout_steps
    from d1.sampling.settings import SamplingSettings as SamplingSettings
    from d1.sampling.stream import rollout_stream as rollout_stream

HOMES = dict.fromkeys(("generate", "rollout", "rollout_steps"), "rollouts") | {"eos_cut": "loop"}
HOMES |= {"Rollout": "record", "RolloutStart": "record", "Step": "record", "SamplingSettings": "settings"}
HOMES |= dict.fromkeys(("infill", "infill_steps", "fill", "fill_steps"), "infilling") | {"rollout_stream": "stream"}
__getattr__ = lazily(__name__, HOMES)
