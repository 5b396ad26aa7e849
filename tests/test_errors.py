"""core/errors.py draws the whole tree of errors: each class stands in it, below its base."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from weenv.core import errors

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "layer", "registry", "converter", "plugin", "environment", "systemd", "cli")


def drawn() -> dict[str, str]:
    """Each name of the drawing with the one that it stands below."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ((?:│   )*)(?:[├└]── )?((?:[A-Z]\w+)(?:, [A-Z]\w+)*)", line):
            depth = len(match[1]) // 4 + ("── " in line)
            for name in match[2].split(", "):
                if depth:
                    found[name] = above[depth - 1]
            above[depth:] = [match[2]]
    return found


def defined() -> dict[str, str]:
    """Each public error of the code with the base that it names."""
    classes = [
        (node.name, [ast.unparse(base) for base in node.bases])
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    known = {"WeenvError"}
    while more := {name for name, bases in classes if name not in known and known & set(bases)}:
        known |= more
    return {name: next(base for base in bases if base in known) for name, bases in classes
            if not name.startswith("_") and known & set(bases)}  # fmt: skip


def test_every_error_stands_in_the_tree() -> None:
    assert drawn() == defined()
