"""The samplers over HTTP: `d1 serve MODEL`. docs/serve.md says how to use it."""

KEY = "D1_API_KEY"  # the environment variable with the key that a server asks for and its clients send
LOCAL = ("localhost", "127.0.0.1", "::1")  # names of the machine itself
