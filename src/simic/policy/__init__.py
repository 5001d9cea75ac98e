"""Networks that decide, and the distribution they decide with. They know tensors, not hosts."""
