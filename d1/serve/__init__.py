"""The samplers behind HTTP: `d1 serve MODEL`. docs/serve.md says how to use it."""
