"""Signatures against cosign itself: what we sign it accepts, what it signs we accept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from weenv_testkit import tools
from weenv_testkit.registry import Registry

LEGACY = ("--new-bundle-format=false", "--allow-insecure-registry", "--allow-http-registry")
"""Signatures beside the image under a tag, in a registry without TLS."""


def call(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a home of its own and unencrypted keys."""
    environment = {**os.environ, "HOME": str(home), "COSIGN_PASSWORD": "", "WEENV_KEY_PASSWORD": ""}
    return subprocess.run(argv, cwd=home, env=environment, capture_output=True, text=True, timeout=120, check=False)


def ok(home: Path, *argv: str) -> str:
    done = call(home, *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def reference(tmp_path: Path, registry: Registry, request: pytest.FixtureRequest) -> str:
    """A published group of its own."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text(request.node.name)
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower()).strip("-")
    found = f"{registry.host}/cosign/{name}:1"
    ok(tmp_path, *tools.weenv(), "group", "build", found, "--from", "tree")
    return found


@pytest.mark.parametrize("algorithm", ["ecdsa-p256", "ed25519"])
def test_cosign_accepts_what_we_sign_and_only_that(tmp_path: Path, reference: str, algorithm: str) -> None:
    for name in ("ours", "other"):
        ok(tmp_path, *tools.weenv(), "group", "keygen", "--algorithm", algorithm, name)
    verify = [tools.cosign(), "verify", "--insecure-ignore-tlog=true", *LEGACY]
    assert call(tmp_path, *verify, "--key", "ours.pub", reference).returncode != 0  # not signed yet
    ok(tmp_path, *tools.weenv(), "group", "sign", "--key", "ours.key", reference)
    assert reference.rpartition(":")[0] in ok(tmp_path, *verify, "--key", "ours.pub", reference)
    assert call(tmp_path, *verify, "--key", "other.pub", reference).returncode != 0


def test_we_accept_what_cosign_signs_and_only_that(tmp_path: Path, reference: str) -> None:
    ok(tmp_path, tools.cosign(), "generate-key-pair")
    ok(tmp_path, *tools.weenv(), "group", "keygen", "other")
    assert call(tmp_path, *tools.weenv(), "group", "verify", "--key", "cosign.pub", reference).returncode == 1
    ok(
        tmp_path, tools.cosign(), "sign", "--yes", "--key", "cosign.key", "--tlog-upload=false", "--use-signing-config=false",
        *LEGACY, reference,
    )  # fmt: skip
    ok(tmp_path, *tools.weenv(), "group", "verify", "--key", "cosign.pub", reference)
    assert call(tmp_path, *tools.weenv(), "group", "verify", "--key", "other.pub", reference).returncode == 1
