"""``weenv run`` where the node asks for signatures: what it remembers starts nothing that is not allowed any more."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from weenv_testkit import tools
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry
from weenv_testkit.running import Bench
from weenv_testkit.store import Store


class Guarded:
    """A node's configuration with a policy, a signed group and a plan of it."""

    def __init__(self, bench: Bench, store: Store, registry: Registry, at: Path) -> None:
        self.bench = bench
        self.repository = f"{registry.host}/run/guarded-{os.urandom(4).hex()}"  # tags of another test's would be believed
        self.key = str(at / "team")
        self.base = store.lazy("small")
        self.policy = at / "policy.yaml"
        self.config = at / "run.toml"
        self.plan = at / "plan.yaml"
        run(*tools.weenv(), "group", "keygen", self.key)
        self.retag(self.base)
        self.sign()
        self.allow("**")
        self.config.write_text(Path(bench.config).read_text() + f'[policy]\nfile = "{self.policy}"\n')
        self.write(f"{self.repository}:1")

    def retag(self, source: str) -> None:
        run(*tools.weenv(), "group", "copy", source, f"{self.repository}:1")

    def sign(self) -> None:
        run(*tools.weenv(), "group", "sign", "--key", f"{self.key}.key", f"{self.repository}:1")

    def allow(self, what: str) -> None:
        rules = [{"match": f"{self.repository.partition('/')[0]}/{what}", "keys": ["team.pub"]}]
        self.policy.write_text(json.dumps({"default": "deny", "rules": rules}))

    def write(self, ref: str) -> None:
        self.plan.write_text(
            f"apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {{name: guarded}}\ngroups: [{json.dumps(ref)}]\n"
        )

    def run(self) -> tuple[int, str, bool]:
        """Exit status, what was said, and whether it went the quick way: without the ordinary one's libraries."""
        argv = [*tools.weenv(), "run", "--rm", "--config", str(self.config), str(self.plan), "--", "echo", "in"]
        env = {key: value for key, value in os.environ.items() if not key.startswith("WEENV_")}
        done = subprocess.run(
            argv, capture_output=True, timeout=120, check=False, text=True, env={**env, "PYTHONPROFILEIMPORTTIME": "1"}
        )
        lines = done.stderr.splitlines()
        said = "".join(line for line in lines if not line.startswith("import time:"))
        assert (done.stdout == "in\n") == (done.returncode == 0), "nothing that is refused runs"
        return done.returncode, said, not any(line.endswith(" grpc") for line in lines)

    def later(self) -> None:
        """As if tags had been asked about long ago."""
        for entry in Path(self.bench.loaded.directory, "plans").iterdir():
            row = json.loads(entry.read_text())
            entry.write_text(json.dumps({**row, "until": 1.0}))
        with sqlite3.connect(os.path.join(self.bench.node.root, "mapping.db"), timeout=20) as db:
            db.execute("UPDATE tags SET checked = 1")
        db.close()


@pytest.fixture
def guarded(bench: Bench, store: Store, registry: Registry, tmp_path: Path) -> Guarded:
    return Guarded(bench, store, registry, tmp_path)


def test_what_is_signed_goes_the_quick_way_until_the_policy_is_another(guarded: Guarded) -> None:
    assert guarded.run() == (0, "", False)
    assert guarded.run() == (0, "", True)
    guarded.allow("other/**")
    status, said, _ = guarded.run()
    assert status == 1 and "allows nothing from there" in said
    guarded.allow("**")
    assert guarded.run()[0] == 0
    assert guarded.run() == (0, "", True)


def test_without_its_key_it_does_not_start(guarded: Guarded) -> None:
    assert [guarded.run(), guarded.run()] == [(0, "", False), (0, "", True)]
    os.rename(f"{guarded.key}.pub", f"{guarded.key}.old")
    status, said, _ = guarded.run()
    assert status == 1 and "cannot read the key" in said
    run(*tools.weenv(), "group", "keygen", f"{guarded.key}2")
    os.rename(f"{guarded.key}2.pub", f"{guarded.key}.pub")
    status, said, _ = guarded.run()
    assert status == 1 and "signed by another key" in said
    os.replace(f"{guarded.key}.old", f"{guarded.key}.pub")
    assert guarded.run()[0] == 0


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
def test_what_cosign_3_has_signed_starts(guarded: Guarded, store: Store, registry: Registry) -> None:
    """A bundle; for this repository, or for none where the policy does not let that count."""
    ref = f"{registry.host}/run/by-cosign-{os.urandom(4).hex()}:1"
    run(*tools.weenv(), "group", "copy", guarded.base, ref)
    guarded.write(ref)
    guarded.repository = ref.rpartition(":")[0]
    env = {**os.environ, "COSIGN_PASSWORD": "", "HOME": str(guarded.policy.parent)}
    theirs = f"{guarded.key}-cosign"
    run(tools.cosign(), "import-key-pair", "--key", f"{guarded.key}.key", "--output-key-prefix", theirs, env=env)
    offline = ("--yes", "--tlog-upload=false", "--use-signing-config=false", "--allow-http-registry")
    sign = (tools.cosign(), "sign", *offline, "--key", f"{theirs}.key")
    status, said, _ = guarded.run()
    assert status == 1 and "is not signed" in said
    run(*sign, ref, env=env)
    status, said, _ = guarded.run()
    assert status == 1 and "signed for no repository" in said
    run(*sign, "-a", f"docker-reference={guarded.repository}", ref, env=env)
    assert [guarded.run(), guarded.run()] == [(0, "", False), (0, "", True)]


def test_a_tag_that_means_something_unsigned_now_does_not_start(guarded: Guarded, store: Store, registry: Registry) -> None:
    assert [guarded.run(), guarded.run()] == [(0, "", False), (0, "", True)]
    other = f"{registry.host}/run/unsigned-{guarded.bench.node.line}:1"
    run(*tools.weenv(), "group", "build", other, "--from-image", guarded.base, "--label", "changed=yes")
    guarded.retag(other)
    guarded.later()
    status, said, _ = guarded.run()
    assert status == 1 and "is not signed" in said
    assert guarded.run()[0] == 1, "nor the next time"
    guarded.sign()
    assert guarded.run()[0] == 0
    assert guarded.run() == (0, "", True)
