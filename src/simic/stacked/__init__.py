"""N hosts of one architecture trained as one tensor program."""
