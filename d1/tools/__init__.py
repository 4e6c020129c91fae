"""Tools that a model calls: formats of calls, functions with limits, and the turns of an episode; see docs/tools.md."""
