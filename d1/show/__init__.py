"""What people look at: tables, curves, and the picture of a rollout."""
