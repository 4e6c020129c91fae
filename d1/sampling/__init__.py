"""The reverse process: from a prompt to a completion."""

from d1.sampling.loop import Rollout as Rollout
from d1.sampling.loop import generate as generate
from d1.sampling.loop import rollout as rollout
