"""Curves of RL runs, and the page on what RL did: `d1.rl.curves`.

python plot_curves.py ../runs/gsm8k --html report.html
"""

from d1.rl.curves import main, make_parser
from d1.runs.entry import run_script

if __name__ == "__main__":
    run_script("plot_curves.py", lambda: main(make_parser().parse_args()))
