"""Where jobs run: the pool protocol and its backends, and stop signals."""
