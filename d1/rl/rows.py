"""Deprecated: these names are in `d1.rl` now."""

from d1.rl.losses import Advantage as Advantage
from d1.rl.losses import LossInputs as LossInputs
from d1.rl.losses import Objective as Objective
from d1.rl.losses import Penalty as Penalty
