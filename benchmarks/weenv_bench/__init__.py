"""Measured comparisons of WeEnv with what users would pick today: ratios within one run of one machine."""
