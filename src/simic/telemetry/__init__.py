"""The log of a run: events, the recorder that writes them, readers, anomaly detection."""
