"""Names of labels and annotations, and nothing else: who only writes them need not import what reads them."""

from __future__ import annotations

ENVIRONMENT = "dev.weenv.environment"
"""On every container of ``weenv run``: the plan's or image's name."""
CEILING = "dev.weenv.ceiling"
"""``<cores>,<bytes>``: how far a plan lets its environments grow; 0: no limit of its own."""

PREFIX = "weenv.dev/"
"""Of what users write, as labels of a container or annotations of a pod."""
ELASTIC = PREFIX + "elastic"
"""``true``: manage this container; ``false``: leave it alone whatever else says otherwise."""
CPU_START = PREFIX + "cpu.start"
CPU_MAX = PREFIX + "cpu.max"
MEMORY_START = PREFIX + "memory.start"
MEMORY_MAX = PREFIX + "memory.max"
PIDS_START = PREFIX + "pids.start"
PIDS_MAX = PREFIX + "pids.max"
ROLE = PREFIX + "role"

ENDED = PREFIX + "ended"
"""Written by the daemon: why an environment ended, or lost a process, for memory: a value of weenv.plugin.nri.events.Cause."""
OOM_KILLS = PREFIX + "oom-kills"
"""Written by the daemon: processes of it that the kernel has killed for memory."""
STARVED = PREFIX + "starved-seconds"
"""Written by the daemon: seconds for which it wanted more than the node could give."""
