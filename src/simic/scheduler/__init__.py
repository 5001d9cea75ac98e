"""GrowthScheduler: growth beside the optimizer of a user's own training loop."""
