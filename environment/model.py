"""The plan as data: which groups are stacked, what differs for this task, what runs in it and with how much.

The YAML form is read by :mod:`weenv.environment.plan`; ``docs/plan.schema.json`` describes it for editors and tools.
"""

from __future__ import annotations

from dataclasses import dataclass, field

API_VERSION = "weenv.dev/v1"
KIND = "EnvironmentPlan"


@dataclass(frozen=True, slots=True)
class GroupUse:
    """One group of the stack: its reference (with ``@sha256:`` once locked)."""

    ref: str
    line: int = 0
    """Line of the plan it stands in, for messages; 0 where the plan was made by code."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change on top of the groups. Exactly one of the kinds is set.

    ``patch`` is the text of a unified or git diff, applied in ``directory`` with ``strip`` leading path components taken
    off; ``files`` maps absolute paths to contents; ``delete`` lists absolute paths; ``chmod`` maps paths to modes;
    ``symlink`` maps paths to targets; ``run`` is a command in the started environment; ``git_commit`` names the commit
    whose checkout the tree at ``directory`` is to be.
    """

    patch: str = ""
    directory: str = "/"
    strip: int = 1
    files: dict[str, bytes] = field(default_factory=dict)
    delete: tuple[str, ...] = ()
    chmod: dict[str, int] = field(default_factory=dict)
    symlink: dict[str, str] = field(default_factory=dict)
    run: tuple[str, ...] = ()
    git_commit: str = ""
    owner: tuple[int, int] | None = None
    """uid and gid of new files; None: those of the directory they are put in."""
    mode: int | None = None
    """Permission bits of new ``files``; None: 0644."""
    line: int = 0


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What the plan says of the process; None or empty: as the groups' configs say, the topmost that says it."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Amount:
    """A start value and a ceiling; 0: none. CPU in cores, memory in bytes."""

    start: float = 0.0
    ceiling: float = 0.0


@dataclass(frozen=True, slots=True)
class Resources:
    """CPU (cores) and memory (bytes) at start and at most, processes at most (0: no limit)."""

    cpu: Amount = field(default_factory=Amount)
    memory: Amount = field(default_factory=Amount)
    pids: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole plan. ``groups`` are bottom to top; ``metadata`` is free text for people and trainers."""

    name: str
    groups: tuple[GroupUse, ...]
    mutations: tuple[Mutation, ...] = ()
    config: PlanConfig = field(default_factory=PlanConfig)
    resources: Resources = field(default_factory=Resources)
    metadata: dict[str, str] = field(default_factory=dict)
    platform: str = ""
    """``linux/amd64`` or the like; empty: the node's own."""
    source: str = ""
    """The file it was read from, for messages and for relative paths in it."""
