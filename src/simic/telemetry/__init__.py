"""What happened in a run: events, who writes them, who reads them."""
