"""Wiring into systemd: the notification protocol, units, their installation."""
