"""Gymnasium environments over host trainings. Nothing else in simic imports gymnasium."""
