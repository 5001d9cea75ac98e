"""The RL view: attribution, governor, vector environment, Gymnasium adapters."""
