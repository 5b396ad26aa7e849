"""What every package needs and nothing else: errors, digests, atomic files, task helpers, logs and metrics."""
