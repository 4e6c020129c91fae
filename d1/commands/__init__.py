"""The commands of `python -m d1`, one file each: `add_arguments(parser)` and `run(args)`.

Nothing here imports torch before `run`, so that `--help` answers at once.
"""
