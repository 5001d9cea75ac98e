"""Views of runs and evaluations: reports."""
