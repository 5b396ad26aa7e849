"""Signatures against cosign itself: what we sign it accepts, what it signs we accept; in a registry that has no referrers API
(Debian's docker-registry) and in one that does."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from simulator.pushable import PushableRegistry

from weenv.cli.main import cli
from weenv.core.errors import VerificationError
from weenv_testkit import tools
from weenv_testkit.registry import Registry

OFFLINE = ("--yes", "--tlog-upload=false", "--use-signing-config=false", "--allow-http-registry")
"""Signing without sigstore's services; in a bundle, as cosign 3 does by default."""
CHECK = ("verify", "--insecure-ignore-tlog=true", "--allow-http-registry")


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
    verify = [tools.cosign(), *CHECK]
    assert call(tmp_path, *verify, "--key", "ours.pub", reference).returncode != 0  # not signed yet
    ok(tmp_path, *tools.weenv(), "group", "sign", "--key", "ours.key", reference)
    assert reference.rpartition(":")[0] in ok(tmp_path, *verify, "--key", "ours.pub", reference)
    assert call(tmp_path, *verify, "--key", "other.pub", reference).returncode != 0


def test_we_accept_what_cosign_signs_and_only_that(tmp_path: Path, reference: str) -> None:
    ok(tmp_path, tools.cosign(), "generate-key-pair")
    ok(tmp_path, *tools.weenv(), "group", "keygen", "other")
    assert call(tmp_path, *tools.weenv(), "group", "verify", "--key", "cosign.pub", reference).returncode == 1
    ok(tmp_path, tools.cosign(), "sign", "--key", "cosign.key", *OFFLINE, "--new-bundle-format=false", reference)
    ok(tmp_path, *tools.weenv(), "group", "verify", "--key", "cosign.pub", reference)
    assert call(tmp_path, *tools.weenv(), "group", "verify", "--key", "other.pub", reference).returncode == 1


# -- bundles ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modern() -> Iterator[PushableRegistry]:
    """A registry with the referrers API, which Debian's does not have, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    sim = PushableRegistry(referrers=True)
    try:
        yield asyncio.run_coroutine_threadsafe(sim.__aenter__(), loop).result(60)
        asyncio.run_coroutine_threadsafe(sim.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture(params=["tag", "referrers"])
def group(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A published group of its own in either registry, and cosign's key pair in the working directory."""
    monkeypatch.chdir(tmp_path)
    host = registry.host if request.param == "tag" else request.getfixturevalue("modern").host
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text(request.node.name)
    found = f"{host}/bundles/{request.node.name.partition('[')[0].replace('_', '-')}:1"
    weenv("group", "build", found, "--from", "tree")
    ok(tmp_path, tools.cosign(), "generate-key-pair")
    return found


def weenv(*argv: str) -> str:
    """The command in this process, which saves half a second. Raises what it would end with."""
    done = CliRunner(env={"WEENV_KEY_PASSWORD": ""}).invoke(cli, argv)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def sign(home: Path, reference: str, *argv: str) -> None:
    ok(home, tools.cosign(), "sign", *OFFLINE, *(argv or ("--key", "cosign.key")), reference)


def refused(*argv: str) -> str:
    """What ``weenv group verify`` complains of."""
    with pytest.raises(VerificationError) as caught:
        weenv("group", "verify", *argv)
    return str(caught.value)


def accepted(*argv: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(weenv("group", "verify", "--json", *argv))
    return found


def test_a_bundle_counts_for_the_name_that_is_signed_along(tmp_path: Path, group: str) -> None:
    name = group.rpartition(":")[0]
    weenv("group", "keygen", "other")
    assert refused("--key", "cosign.pub", group).endswith("is not signed")
    sign(tmp_path, group)
    assert "signed for no repository" in refused("--key", "cosign.pub", group)
    assert accepted("--key", "cosign.pub", "--identity", "**", group)["identity"] == ""
    assert "another key" in refused("--key", "other.pub", "--identity", "**", group)
    sign(tmp_path, group, "--key", "cosign.key", "-a", f"docker-reference={name}", "-a", "by=me")
    found = accepted("--key", "other.pub", "--key", "cosign.pub", group)
    assert (found["identity"], found["optional"]) == (name, {"docker-reference": name, "by": "me"})
    ok(tmp_path, tools.cosign(), *CHECK, "--key", "cosign.pub", group)
    # Replayed: image and bundles, byte for byte, under another name.
    digest = str(found["digest"]).replace(":", "-")
    weenv("group", "copy", group, f"{name}-other:1")
    for tag in json.loads(weenv("group", "tags", "--json", name)):
        if tag == digest:
            weenv("group", "copy", f"{name}:{tag}", f"{name}-other:{tag}")
    sign(tmp_path, f"{name}-other:1", "--key", "cosign.key", "-a", f"docker-reference={name}")
    assert f"signed for another repository, {name}" in refused("--key", "cosign.pub", f"{name}-other:1")


def test_the_nodes_policy_reads_bundles(tmp_path: Path, group: str) -> None:
    """What composing, running and resolving ask before anything is used."""
    name = group.rpartition(":")[0]
    rules = f'[policy]\ndefault = "deny"\n[[policy.rules]]\nmatch = "{name}"\nkeys = ["{tmp_path}/cosign.pub"]\n'
    (tmp_path / "strict.toml").write_text(rules)
    (tmp_path / "any.toml").write_text(rules + 'identity = ["**"]\n')

    def resolves(config: str) -> str:
        try:
            weenv("group", "resolve", "--cache", ":memory:", "--config", config, group)
        except VerificationError as error:
            return str(error)
        return "yes"

    assert all(resolves(config).endswith("is not signed") for config in ("strict.toml", "any.toml"))
    sign(tmp_path, group)
    assert resolves("any.toml") == "yes"
    assert "for no repository" in resolves("strict.toml")
    sign(tmp_path, group, "--key", "cosign.key", "-a", f"docker-reference={name}")
    assert resolves("strict.toml") == "yes"


@pytest.mark.parametrize("group", ["tag"], indirect=True)
def test_attestations_and_signatures_without_a_key_do_not_count(tmp_path: Path, group: str) -> None:
    (tmp_path / "predicate").write_text('{"passed": false}')
    attest = (tools.cosign(), "attest", *OFFLINE, "--predicate", "predicate", "--type", "custom")
    ok(tmp_path, *attest, "--key", "cosign.key", group)
    assert refused("--key", "cosign.pub", "--identity", "**", group).endswith("is not signed")
    # A certificate's: made by a key that nobody here knows, as far as the bundle says.
    weenv("group", "keygen", "secret")
    usage = ("-addext", "extendedKeyUsage=codeSigning", "-addext", "subjectAltName=email:me@example.com")
    ok(tmp_path, "openssl", "req", "-x509", "-new", "-key", "secret.key", "-subj", "/CN=me", *usage, "-out", "cert.pem")
    ok(tmp_path, tools.cosign(), "import-key-pair", "--key", "secret.key", "--output-key-prefix", "theirs")
    sign(tmp_path, group, "--key", "theirs.key", "--certificate", "cert.pem", "--certificate-chain", "cert.pem")
    assert "signed without a key, by a certificate" in refused("--key", "cosign.pub", "--identity", "**", group)
    sign(tmp_path, group)
    assert accepted("--key", "cosign.pub", "--identity", "**", group)["accepted"]


@pytest.mark.parametrize("group", ["tag"], indirect=True)
def test_of_ed25519_we_think_as_cosign_does(tmp_path: Path, group: str) -> None:
    """cosign 3.1 signs by another scheme than it verifies: it refuses its own signature, and so do we, saying what to do."""
    weenv("group", "keygen", "--algorithm", "ed25519", "ed")
    ok(tmp_path, tools.cosign(), "import-key-pair", "--key", "ed.key", "--output-key-prefix", "theirs")
    sign(tmp_path, group, "--key", "theirs.key")
    if call(tmp_path, tools.cosign(), *CHECK, "--key", "ed.pub", group).returncode == 0:
        assert accepted("--key", "ed.pub", "--identity", "**", group)["accepted"]
    else:
        assert "use an ECDSA key" in refused("--key", "ed.pub", "--identity", "**", group)


def test_cosign_accepts_ours_beside_a_bundle(tmp_path: Path, group: str, request: pytest.FixtureRequest) -> None:
    """docs/groups.md says which flags it takes for that."""
    weenv("group", "keygen", "ours")
    weenv("group", "sign", "--key", "ours.key", group)
    flags = [] if request.node.callspec.params["group"] == "tag" else ["--experimental-oci11"]
    ok(tmp_path, tools.cosign(), *CHECK, *flags, "--key", "ours.pub", group)
    sign(tmp_path, group)
    ok(tmp_path, tools.cosign(), *CHECK, *flags, "--new-bundle-format=false", "--key", "ours.pub", group)
    assert accepted("--key", "ours.pub", group)["identity"] == group.rpartition(":")[0]
