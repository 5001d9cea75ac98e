"""The life of a seed: stages, ramps, actions, and the slots of N hosts as arrays. Nothing here loads torch."""
