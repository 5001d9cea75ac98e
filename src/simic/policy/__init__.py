"""Policy networks and their action distribution. They work on tensors and know nothing about hosts."""
