"""Curves and films of rollouts for people to look at: as HTML pages, in a terminal and as pictures."""
