"""Curves of RL runs, or an HTML report on them: `d1.show.report`.

python plot_curves.py ../runs/gsm8k --html report.html
"""

from d1.runs.cli import run_script
from d1.show.report import main, make_parser

if __name__ == "__main__":
    run_script("plot_curves.py", lambda: main(make_parser().parse_args()))
