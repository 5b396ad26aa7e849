"""What of a layer is on this disk: its data, and which frames of it are there."""
