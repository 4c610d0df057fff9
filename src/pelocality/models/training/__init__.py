"""Models that train: measured while they do, or with their positions moved into an encoding."""
