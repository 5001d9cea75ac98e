"""Files on disk: atomic writes, strict JSON, bundles of tensors, checkpoints and the directory of a run."""
