"""Write docs/logs.md from the code: ``.venv/bin/python docs/make_logs.py``."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass

from weenv.core.log import event_name

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = ("plugin", "registry", "converter", "environment", "systemd", "core", "layer")
LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error", "critical": "critical"}

HEAD = """# Logs

Every daemon writes one line for each event to stderr: for people (`--log-format text`, the default) or one JSON object
(`--log-format json`). `--log-level debug` adds what is left out here. `docs/make_logs.py` writes this page from the code.

```json
{"reason": "not-converted", "image": "registry.example/team/env:1", "layer": "sha256:...", "hint": "weenv convert makes ...",
 "time": 1796000000.123, "level": "warning", "logger": "weenv.plugin.snapshotter.resolve",
 "event": "image-is-not-served-lazily", "message": "image is not served lazily: the layer is not in the lazy format"}
```
(In one line, of course.)

| key | always there | what it is |
|---|---|---|
| `time` | yes | seconds since 1970, as a number |
| `level` | yes | `debug`, `info`, `warning`, `error`, `critical` |
| `logger` | yes | the module that says it |
| `event` | yes | the name of the event: it does not depend on what the line is about, and changes with this page only |
| `message` | yes | the sentence for people |
| `traceback` | no | of an unexpected error |
"""

KEYS = {
    "address": "where it listens",
    "blob": "a blob's digest",
    "bytes": "an amount in bytes",
    "chain": "chainID of the layers up to this one",
    "code": "of an answer (gRPC)",
    "containerd": "containerd's socket",
    "count": "how many",
    "data": "bytes of disk that the layers' data takes",
    "detail": "what exactly was wrong",
    "digest": "a digest",
    "error": "the error's text",
    "expected": "digest that it should have",
    "found": "digest that it has",
    "format": "`estargz` or `zstd:chunked`",
    "frame": "number of a frame of the layer",
    "frames": "how many frames",
    "group": "reference of a layer group",
    "groups": "repositories that may be stacked",
    "high": "bytes from which on frames are evicted",
    "hint": "what to do about it",
    "host": "a registry",
    "id": "number of a snapshot's directory",
    "image": "reference of the image",
    "in_seconds": "seconds until it is tried again",
    "key": "key of a snapshot",
    "known": "layers known",
    "layer": "digest of the layer, or its first 12 digits",
    "layer_id": "number of the layer's mount point",
    "layers": "how many layers",
    "lazy": "whether layers are served lazily",
    "low": "bytes down to which is evicted",
    "method": "method of a request",
    "mode": "`lazy` or `complete`",
    "mounted": "layers mounted",
    "mountpoint": "where blobfs is mounted",
    "mounts": "mount points",
    "namespace": "containerd's namespace",
    "nri": "NRI's socket",
    "of": "bytes in all",
    "opcode": "number of a FUSE operation",
    "path": "a file or directory",
    "plans": "where plans are looked for",
    "reason": "why, one of the fixed values that docs/metrics.md lists",
    "reasons": "why, by layer",
    "reference": "a reference",
    "resumed": "whether the mount is an older server's",
    "root": "the root directory",
    "seconds": "seconds that it takes or took",
    "sent": "bytes sent",
    "size": "bytes",
    "snapshot": "name of a snapshot",
    "socket": "where it listens",
    "source": "where the bytes came from",
    "why": "the reason in words",
}
"""Fields; a daemon may say more at the level debug."""


@dataclass(frozen=True, order=True)
class Event:
    """A log call: who says it, its name and level, and the fields that it may have."""

    module: str
    name: str
    level: str
    fields: tuple[str, ...]


def sources() -> Iterator[tuple[str, str]]:
    """Module name and path of every file that may log."""
    for package in PACKAGES:
        for folder, _, names in sorted(os.walk(os.path.join(ROOT, package))):
            for name in sorted(names):
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    yield "weenv." + os.path.relpath(path, ROOT).removesuffix(".py").replace("/", "."), path


def _keys(node: ast.expr, local: dict[str, set[str]]) -> set[str]:
    """The keys of a dict as written, with those of the local names that it is made of."""
    if isinstance(node, ast.Dict):
        found: set[str] = set()
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found |= _keys(value, local)
            elif isinstance(key, ast.Constant):
                found.add(str(key.value))
        return found
    return set(local.get(node.id, set())) if isinstance(node, ast.Name) else set()


def events() -> Iterator[Event]:
    """All log calls at info and above."""
    for module, path in sources():
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))]:
            local: dict[str, set[str]] = {}
            body = list(_own(function))
            for node in body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            local[target.id] = local.get(target.id, set()) | _keys(node.value, local)
            for node in body:
                if isinstance(node, ast.Call) and (event := _event(node, module, local)) is not None:
                    yield event


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function and in none within it, in the order in which it is written."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _own(child)


def _event(call: ast.Call, module: str, local: dict[str, set[str]]) -> Event | None:
    """The event of a call of ``log``'s methods."""
    method = call.func
    if not (isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name) and method.value.id == "log"):
        return None
    first = call.args[0] if call.args else None
    if method.attr not in LEVELS or not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        return None
    fields = next((_keys(keyword.value, local) for keyword in call.keywords if keyword.arg == "extra"), set())
    return Event(module, event_name(first.value, module), LEVELS[method.attr], tuple(sorted(fields)))


def page() -> str:
    """The whole page."""
    found = sorted(set(events()))
    lines = [HEAD, "## Fields", "", "| key | what it is |", "|---|---|"]
    lines += [f"| `{key}` | {text} |" for key, text in sorted(KEYS.items())]
    lines += ["", "## Events", "", "| event | level | fields | said by |", "|---|---|---|---|"]
    for event in sorted(found, key=lambda event: (event.name, event.module)):
        fields = ", ".join(f"`{field}`" for field in event.fields) or "-"
        lines.append(f"| `{event.name}` | {event.level} | {fields} | `{event.module.removeprefix('weenv.')}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with open(os.path.join(ROOT, "docs", "logs.md"), "w", encoding="utf-8") as file:
        file.write(page())
