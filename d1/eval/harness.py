"""python harness.py --model_path PATH --tasks gsm8k,hellaswag [--num_fewshot 4] [--apply_chat_template] ...

Runs the tasks of lm-evaluation-harness (`pip install -e ..[harness]`) on a masked diffusion model. The flags below say
how the model samples and scores; all others are `lm_eval`'s own (`lm_eval run --help`): tasks, examples, chat template,
system prompt, --limit, --include_path, --output_path, --log_samples, --gen_kwargs. On several GPUs:
`accelerate launch harness.py ...`.

Temperature and stop strings are the task's (`--gen_kwargs temperature=0.9,do_sample=True`). So is the length of a
completion, unless --gen_length is given. With `--use_cache PATH` a killed run, started again, asks for nothing twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from d1.ranges import COUNT, SEED
from d1.runs.entry import OneLineParser
from d1.runs.output_dir import write_atomically
from d1.sampling.flags import add_model_flags, add_sampling_flags, sampling_settings

MISSING = "lm-evaluation-harness is not installed: pip install -e '.[harness]' in the checkout, or pip install lm-eval"


class PassingParser(OneLineParser):
    """Keeps the flags that it does not know, as `harness`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        known, rest = self.parse_known_args(args, namespace)
        known.harness = rest
        return known


def make_parser() -> argparse.ArgumentParser:
    parser = PassingParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    model = parser.add_argument_group("model")
    add_model_flags(model, checkpoint_path={"default": ""})
    model.add_argument("--batch_size", type=COUNT, default=32, help="sequences per forward pass of each process")
    sampling = parser.add_argument_group("tasks that generate")
    add_sampling_flags(
        sampling,
        leave_out=("temperature", "seed"),
        gen_length={"default": None, "help": "tokens per completion (default: what the task allows)"},
    )
    scoring = parser.add_argument_group("tasks that compare log-likelihoods")
    scoring.add_argument("--mc_num", type=COUNT, default=128, help="masks per answer (default: 128, as LLaDA)")
    scoring.add_argument("--antithetic", action="store_true", help="draw masks in opposite pairs")
    parser.add_argument("--draw_seed", type=SEED, default=0, help="of masks and of sampling; --seed is the harness's")
    return parser


def main(args: argparse.Namespace) -> None:
    """Runs lm_eval's own command with the model "d1" known to it.

    Raises:
        ImportError: the harness is not installed.
        ValueError: a setting makes no sense, or the cache is of another run; before the model is loaded.
    """
    from d1.eval.completions import leave_processes
    from d1.eval.setup import config_of

    own = {name: value for name, value in vars(args).items() if name not in ("harness", "batch_size")}
    length = args.gen_length or 1024  # a task's own is not known yet
    of_a_task = {"gen_length": length, "diffusion_steps": args.diffusion_steps or length, "temperature": 0.0}
    config = config_of(args.model_path, args.checkpoint_path)
    own["block_length"] = sampling_settings(own | of_a_task, config).block_length
    register()
    from lm_eval.__main__ import cli_evaluate

    cache = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    cache.add_argument("--use_cache", "-c")
    if path := cache.parse_known_args(args.harness)[0].use_cache:
        check_cache(Path(f"{path}.json"), own)
    given = {name: value for name, value in own.items() if value is not None}
    sys.argv = ["lm_eval", "run", "--model", "d1", "--model_args", json.dumps(given)]
    sys.argv += ["--batch_size", str(args.batch_size), *args.harness]
    cli_evaluate()
    leave_processes()


@lru_cache
def register() -> type:
    """Makes the model known to the harness as "d1", for `lm_eval.simple_evaluate(model="d1", ...)`; returns its class.

    Raises:
        ImportError: the harness is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "lm_eval":
            raise
        raise ImportError(MISSING) from error
    from d1.eval.harness_model import HarnessModel

    return register_model("d1")(type("D1", (HarnessModel, TemplateLM), {"parser": staticmethod(make_parser)}))


def check_cache(record: Path, settings: dict[str, Any]) -> None:
    """Keeps beside the harness's cache, which knows requests alone, what its answers were made with.

    Raises:
        ValueError: they were made with other weights or settings.
    """
    from d1.eval.setup import fingerprints

    now = {**settings, "weights": fingerprints(settings["model_path"], settings["checkpoint_path"])}
    if not record.exists():
        record.parent.mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") == "0":
            write_atomically(record, json.dumps(now, indent=1))
        return
    before = json.loads(record.read_text())
    changed = [
        f"{name} {before.get(name)!r} (now {value!r})" for name, value in now.items() if before.get(name) != value
    ]
    if changed:
        raise ValueError(f"the answers in {record.stem} were made with {', '.join(changed)}: name another --use_cache")
