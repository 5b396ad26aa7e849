"""Wiring into systemd: empty in this version; the daemons run in the foreground and log to stderr."""
