"""Deprecated: these names are in `d1.rl` now."""

import warnings

from d1.rl.losses import Advantage as Advantage
from d1.rl.losses import LossInputs as LossInputs
from d1.rl.losses import Objective as Objective
from d1.rl.losses import Penalty as Penalty

warnings.warn("d1.rl.rows is now d1.rl: from d1.rl import Objective", FutureWarning, stacklevel=2)
