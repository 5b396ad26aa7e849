"""Which frames to fetch, and fetching each once."""
