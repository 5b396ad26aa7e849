"""NRI's wire without I/O: bytes in, calls and replies out.

``mux`` cuts the trunk into connections, ``ttrpc`` these into messages, ``session`` makes calls and replies of them,
``messages`` knows the fields. The shell around it is :mod:`weenv.plugin.nri.nriplugin`.
"""
