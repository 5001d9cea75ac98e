"""What a decision was worth: facts of one step, terms, the schemes that weigh them, and detectors of gaming."""
