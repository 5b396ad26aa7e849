"""Write docs/configuration.md from the configuration dataclasses: ``.venv/bin/python docs/make_configuration.py``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import textwrap
from typing import Any

from weenv.environment.composeconfig import ComposeConfig
from weenv.environment.gateway.config import GatewayConfig
from weenv.environment.runconfig import RunConfig
from weenv.plugin.nri.config import AdmissionRules, CpuRules, ElasticConfig, MemoryRules
from weenv.plugin.nri.nriconfig import NriConfig
from weenv.plugin.nri.serveconfig import ServeConfig
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig, CacheConfig, FillConfig, PrefetchConfig
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.registry.config import RegistryConfig

HEAD = """# Configuration

One TOML file, `/etc/weenv/config.toml` (or `--config FILE`), read by the daemons and by every command, of which each
looks at the tables that it needs; a missing file means the defaults, an unknown or wrong setting is an error that names
it. Times are in seconds, sizes in bytes. This page is
written by `docs/make_configuration.py` from the code.

One more table, `[policy]`, is described in [groups.md](groups.md).
"""

TABLES: list[tuple[str, type[Any], set[str], str]] = [
    ("snapshotter", SnapshotterConfig, {"registry", "blobfs_socket"}, "`weenv snapshotter serve`."),
    ("registry", RegistryConfig, set(), "How registries are reached, by both daemons."),
    ("blobfs", BlobfsConfig, {"fill", "cache", "prefetch"}, "`weenv blobfs serve`."),
    ("blobfs.fill", FillConfig, set(), "Fetching the rest of a layer when nobody needs the machine."),
    ("blobfs.prefetch", PrefetchConfig, set(), "What profiles of images say is needed ([profiles.md](profiles.md))."),
    ("blobfs.cache", CacheConfig, set(), "How much of the layers' data is kept on disk ([cache.md](cache.md))."),
    ("run", RunConfig, set(), "Defaults of `weenv run`, `exec`, `ps` and their like; options of the commands win."),
    ("compose", ComposeConfig, set(), "Groups of plans that are not in the lazy format (plans.md)."),
    ("gateway", GatewayConfig, set(), "`weenv gateway serve` ([gateway.md](gateway.md))."),
    (
        "elastic",
        ElasticConfig,
        {"cpu", "memory", "admission", "serve"},
        "Live CPU and memory quotas ([elastic.md](elastic.md)).",
    ),
    (
        "elastic.cpu",
        CpuRules,
        set(),
        "When CPU quotas move. Shares are of the quota in force or of its periods.",
    ),
    ("elastic.memory", MemoryRules, set(), "When memory limits move. Shares are of the limit; use means the working set."),
    ("elastic.admission", AdmissionRules, set(), "What may be promised to whom. Shares are of the node."),
    ("elastic.serve", ServeConfig, set(), "The daemon, `weenv elastic serve`."),
    ("nri", NriConfig, set(), "The NRI plugin, of `weenv elastic serve` or by itself ([elastic.md](elastic.md))."),
]


def toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | frozenset):
        return str(sorted(value))
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def texts(cls: type[Any]) -> dict[str, str]:
    """The docstring below each field of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            assert isinstance(after.value, ast.Constant)
            found[field.target.id] = " ".join(str(after.value.value).split()).replace("``", "`")
    return found


def page() -> str:
    """The whole page."""
    out = [HEAD]
    for name, cls, skip, about in TABLES:
        out.append(f"## `[{name}]`\n\n{about}\n\n| setting | default | what it is |\n|---|---|---|")
        described, defaults = texts(cls), cls()
        shown = [item.name for item in dataclasses.fields(cls) if item.name not in skip]
        out.extend(f"| `{item}` | `{toml(getattr(defaults, item))}` | {described.get(item, '')} |" for item in shown)
        out.append("")
    return "\n".join(out)


if __name__ == "__main__":
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "configuration.md"), "w", encoding="utf-8") as file:
        file.write(page())
