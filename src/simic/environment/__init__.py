"""Many host trainings as one environment: decision cycle, episodes, attribution."""
