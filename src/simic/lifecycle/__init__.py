"""The lifecycle of a seed: stages, alpha ramps, actions, and the slots of N hosts as arrays. Imports no torch."""
