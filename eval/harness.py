"""Run lm-evaluation-harness on a masked diffusion model: `d1.eval.harness`.

python harness.py --model_path ../pocket/base --tasks gsm8k
"""

from d1.eval.harness import main, make_parser
from d1.runs.cli import run_script

if __name__ == "__main__":
    run_script("harness.py", lambda: main(make_parser().parse_args()))
