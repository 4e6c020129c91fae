"""The commands of `python -m d1`. Each has a function that adds its arguments to a parser, and one that runs it.

Nothing here imports torch before a command runs, so that `--help` is fast.
"""
