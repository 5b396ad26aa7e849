"""The ``weenv`` command: one module per command, drawing apart in :mod:`weenv.cli.render`."""
