"""The test kit: real containerd, runc, registry and images, started privately and taken away again without a trace.

Everything here needs root. Nothing touches a containerd that is already running, a system directory or somebody else's
process: programs come from a private cache (:mod:`weenv_testkit.fetch_tools`), state lives in one temporary directory
per session (:mod:`weenv_testkit.workdir`), processes are ended by pid (:mod:`weenv_testkit.procs`).
"""
