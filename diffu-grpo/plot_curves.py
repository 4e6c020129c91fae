"""Curves of RL runs, or an HTML report on them: `d1.rl.curves`.

python plot_curves.py ../runs/gsm8k --html report.html
"""

from d1.rl.curves import main, make_parser
from d1.runs.entry import run_script

if __name__ == "__main__":
    run_script("plot_curves.py", lambda: main(make_parser().parse_args()))
