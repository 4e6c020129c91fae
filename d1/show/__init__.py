"""What people look at: tables, curves, and films of rollouts, as pages, in a terminal and as pictures."""
