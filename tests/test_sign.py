"""registry/groupref/{keys,policy,sign}.py: signatures as cosign makes them, and what a node's policy lets through."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.pushable import PushableRegistry

from weenv.core.digest import sha256
from weenv.core.errors import BadReference, ConfigError, FormatError, UnavailableError, VerificationError, WeenvError
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.groupref import keys as keyring
from weenv.registry.groupref.cache import MappingCache
from weenv.registry.groupref.policy import (
    Signature,
    check_signatures,
    load_policy,
    make_payload,
    matches,
    parse_payload,
    parse_policy,
    policy_from_tables,
)
from weenv.registry.groupref.resolve import Resolver
from weenv.registry.groupref.search import PAYLOAD_TYPE, REFERRER_TYPE, SIGNATURE_ANNOTATION, Search, signature_tag
from weenv.registry.groupref.sign import sign, verify
from weenv.registry.layout import Layout
from weenv.registry.manifest import OCI_CONFIG, OCI_INDEX, OCI_LAYER_ZSTD, OCI_MANIFEST
from weenv.registry.reference import parse_location

QUICK = RegistryConfig(attempts=1, deadline=5.0, retry_delay=0.01)
A = sha256(b"a")
KEYS = {name: keyring.generate(name) for name in keyring.ALGORITHMS}


def public(key: keyring.PrivateKey) -> keyring.PublicKey:
    return keyring.load_public(keyring.public_pem(key), name="test")


def openssl(*arguments: str, data: bytes = b"") -> bytes:
    return subprocess.run(["openssl", *arguments], input=data, capture_output=True, check=True).stdout


# -- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", keyring.ALGORITHMS)
def test_openssl_accepts_our_signatures_and_we_its(tmp_path: Path, algorithm: str) -> None:
    key = KEYS[algorithm]
    payload = tmp_path / "payload"
    payload.write_bytes(make_payload("registry.example/team/tool", A))
    (tmp_path / "pub").write_bytes(keyring.public_pem(key))
    (tmp_path / "key").write_bytes(keyring.private_pem(key))
    (tmp_path / "sig").write_bytes(keyring.sign(key, payload.read_bytes()))
    raw = ["-rawin"] if algorithm == "ed25519" else ["-rawin", "-digest", "sha256"]
    arguments = ["-in", str(payload), "-sigfile", str(tmp_path / "sig"), "-inkey", str(tmp_path / "pub"), "-pubin"]
    assert b"Success" in openssl("pkeyutl", "-verify", *raw, *arguments)
    theirs = openssl("pkeyutl", "-sign", *raw, "-in", str(payload), "-inkey", str(tmp_path / "key"))
    assert public(key).verify(payload.read_bytes(), theirs)
    assert not public(key).verify(payload.read_bytes() + b" ", theirs)
    der = openssl("pkey", "-pubin", "-in", str(tmp_path / "pub"), "-outform", "DER")
    assert sha256(der) == "sha256:" + public(key).fingerprint


def test_keys_of_openssl_can_be_used(tmp_path: Path) -> None:
    pem = openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    key = keyring.load_private(pem)
    assert public(key).verify(b"x", keyring.sign(key, b"x"))
    for algorithm in (["RSA"], ["EC", "-pkeyopt", "ec_paramgen_curve:P-384"]):
        pem = openssl("genpkey", "-algorithm", *algorithm)
        with pytest.raises(ConfigError, match="another kind"):
            keyring.load_private(pem)
        with pytest.raises(ConfigError, match="another kind"):
            keyring.load_public(openssl("pkey", "-pubout", data=pem))


@pytest.mark.parametrize("algorithm", keyring.ALGORITHMS)
def test_key_files(tmp_path: Path, algorithm: str) -> None:
    private, pub = keyring.write_key_pair(str(tmp_path / "k"), KEYS[algorithm], b"secret")
    assert os.stat(private).st_mode & 0o777 == 0o600
    data = keyring.read_key_file(private)
    assert b"ENCRYPTED" in data
    assert public(keyring.load_private(data, b"secret")).fingerprint == public(KEYS[algorithm]).fingerprint
    assert keyring.load_public(keyring.read_key_file(pub)).fingerprint == public(KEYS[algorithm]).fingerprint
    for password in (b"", b"wrong"):
        with pytest.raises(ConfigError, match="password"):
            keyring.load_private(data, password)
    with pytest.raises(ConfigError, match="cannot write"):
        keyring.write_key_pair(str(tmp_path / "k"), KEYS[algorithm])
    assert keyring.read_key_file(private) == data
    (tmp_path / "large").write_bytes(data + b"\n" * keyring.MAX_KEY_FILE)
    with pytest.raises(ConfigError, match=f"large is larger than {keyring.MAX_KEY_FILE} bytes"):
        keyring.read_key_file(str(tmp_path / "large"))
    with pytest.raises(ConfigError, match="cosign's own"):
        keyring.load_private(b"-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")


@given(st.binary(max_size=300))
def test_junk_is_no_key(data: bytes) -> None:
    with pytest.raises(ConfigError):
        keyring.load_public(data)
    with pytest.raises(ConfigError):
        keyring.load_private(data)


# -- payloads ---------------------------------------------------------------------------------------------------------


def test_the_payload_is_cosigns() -> None:
    """The bytes that cosign writes for the same image (its SIGNATURE_SPEC.md and documentation show them)."""
    assert make_payload("Registry.example/team/tool:v1".lower(), A) == (
        b'{"critical":{"identity":{"docker-reference":"registry.example/team/tool"},"image":{"docker-manifest-digest":"'
        + A.encode()
        + b'"},"type":"cosign container image signature"},"optional":null}'
    )
    theirs = make_payload("docker.io/library/x", A).replace(b"docker.io/library/x", b"index.docker.io/library/x")
    assert parse_payload(theirs).reference == "docker.io/library/x"


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=40), max_size=4), st.binary(max_size=20))
def test_payloads_round_trip(optional: dict[str, str], seed: bytes) -> None:
    payload = parse_payload(make_payload("r.example:5000/a/b", sha256(seed), optional))
    assert (payload.reference, payload.digest, dict(payload.optional)) == ("r.example:5000/a/b", sha256(seed), optional)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.just(A),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["critical", "identity", "docker-reference", "image", "docker-manifest-digest", "type", "optional"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_other_payloads_are_format_errors(data: bytes) -> None:
    try:
        payload = parse_payload(data)
    except FormatError:
        return
    assert payload.digest == A and "/" in payload.reference


@pytest.mark.parametrize("old", [A, '"r.example/a"'])
@pytest.mark.parametrize("new", ["null", "5", '""', "[]", '"A b"'])
def test_payloads_that_name_no_image(old: str, new: str) -> None:
    data = make_payload("r.example/a", A).replace(json.dumps(old.strip('"')).encode(), new.encode())
    with pytest.raises(FormatError, match="names no image"):
        parse_payload(data)


@given(st.integers(0, 400), st.integers(1, 255), st.sampled_from(keyring.ALGORITHMS))
def test_a_changed_byte_never_passes(position: int, change: int, algorithm: str) -> None:
    key = KEYS[algorithm]
    payload = make_payload("r.example/a", A)
    signature = keyring.sign(key, payload)
    whole = bytearray(payload + signature)
    whole[position % len(whole)] ^= change
    altered = Signature(bytes(whole[: len(payload)]), bytes(whole[len(payload) :]))
    with pytest.raises(VerificationError):
        check_signatures([altered], [A], ["r.example/a"], [public(key)], "x")


def test_what_does_not_count_is_named() -> None:
    key, other = KEYS["ed25519"], KEYS["ecdsa-p256"]

    def by(signer: keyring.PrivateKey, payload: bytes) -> Signature:
        return Signature(payload, keyring.sign(signer, payload))

    good = by(key, make_payload("r.example/a", A))
    for signature, message in (
        (by(other, make_payload("r.example/a", A)), "another key"),
        (by(key, make_payload("r.example/b", A)), "another repository, r.example/b"),
        (by(key, make_payload("r.example/a", sha256(b"b"))), "another digest"),
        (by(key, b"{}"), "has no critical"),
        (by(key, make_payload("r.example/a", A).replace(b"cosign con", b"atomic con")), "unknown type"),
    ):
        with pytest.raises(VerificationError, match=message):
            check_signatures([signature], [A], ["r.example/a"], [public(key)], "x")
        accepted = check_signatures([signature, good], [A], ["r.example/a"], [public(key)], "x")
        assert accepted.payload.digest == A, "one that counts is enough"
    with pytest.raises(VerificationError, match="not signed"):
        check_signatures([], [A], ["r.example/a"], [public(key)], "x")


# -- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("r.example/a", "r.example/a", True), ("r.example/a", "r.example/a/b", False), ("r.example/*", "r.example/a", True),
        ("r.example/*", "r.example/a/b", False), ("r.example/**", "r.example/a/b", True), ("**", "x/y", True),
        ("r.example/**", "r.example.evil/a", False), ("r.example/a-*", "r.example/a-1", True),
        ("r.example/**", "evil/r.example/a", False), ("r?example/a", "r.example/a", False), ("oci:/srv/**", "oci:/srv/x", True),
        ("r.example/a", "r.example/a\n", False), ("r.example/**", "R.Example/a", True), ("R.example/**", "r.example/a", True),
        ("r.example/**", "r.example:443/a", True), ("r.example:443/*", "r.example/a", True),
        ("r.example/**", "r.example:0443/a", True), ("r.example/**", "r.example:5000/a", False),
        ("r.example:5000/**", "r.example/a", False), ("oci:/srv/a", "oci:/srv/A", False),
    ],
)  # fmt: skip
def test_patterns(pattern: str, name: str, covered: bool) -> None:
    assert matches(pattern, name) is covered


def test_policies_from_files(tmp_path: Path) -> None:
    keyring.write_key_pair(str(tmp_path / "team"), KEYS["ed25519"])
    (tmp_path / "p.toml").write_text(
        'default = "deny"\n[[rules]]\nmatch = "r.example/free/**"\naction = "allow"\n'
        '[[rules]]\nmatch = ["r.example/**"]\nkeys = ["team.pub"]\n'
    )
    (tmp_path / "p.yaml").write_text(
        'policy:\n  default: deny\n  rules:\n  - {match: "r.example/free/**", action: allow}\n'
        '  - {match: ["r.example/**"], keys: [team.pub]}\n'
    )
    one, two = load_policy(str(tmp_path / "p.toml")), load_policy(str(tmp_path / "p.yaml"))
    assert one.fingerprint == two.fingerprint
    assert [one.rule(name).action for name in ("r.example/free/x", "r.example/x", "other/x")] == ["allow", "require", "deny"]
    via = policy_from_tables({"policy": {"file": str(tmp_path / "p.toml")}})
    assert via is not None and via.fingerprint == one.fingerprint
    assert policy_from_tables({}) is None
    for bad in (
        {"default": "maybe"}, {"rule": []}, {"rules": {}}, {"rules": [{"match": "x"}]}, {"rules": [{"keys": ["k"]}]},
        {"rules": [{"match": "x", "action": "require"}]}, {"rules": [{"match": [1], "action": "allow"}]}, [],
        {"rules": [{"match": "x", "keys": ["/nonexistent"]}]}, {"file": "/x", "default": "deny"}, {"rules": ["x"]},
        {"rules": [{"match": "x", "action": "allow", "keys": [str(tmp_path / "team.pub")]}]},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            parse_policy(bad)
    for rule, message in (
        ("x", "must be a table"), (["x"], "must be a table"), ({"action": "deny"}, "matches nothing"),
        ({"match": [], "action": "deny"}, "matches nothing"), ({"matches": "x", "action": "deny"}, "unknown setting"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            parse_policy({"rules": [rule]})
    for name, text in (("a.yaml", "{"), ("b.toml", "="), ("c.yaml", ""), ("d.toml", "x = 1")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError):
            load_policy(str(tmp_path / name))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a pipe, not a file"):
        load_policy(str(tmp_path / "pipe"))


# -- beside what they sign -------------------------------------------------------------------------------------------


def image(sim: PushableRegistry, repository: str, tag: str, *, index: bool = False, seed: str = "") -> str:
    """Put an image (in an index) into a repository of the registry; the digest of what the tag means."""
    from simulator.pushable import Repository

    held = sim.repositories.setdefault(repository, Repository())
    config = json.dumps({"os": "linux", "architecture": "amd64", "seed": seed,
                         "rootfs": {"type": "layers", "diff_ids": [A]}}).encode()  # fmt: skip
    held.blobs[sha256(config)] = config
    layer = {"mediaType": OCI_LAYER_ZSTD, "digest": sha256(b"layer"), "size": 5}
    described = {"mediaType": OCI_CONFIG, "digest": sha256(config), "size": len(config)}
    data = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": described, "layers": [layer]}).encode()
    digest = sha256(data)
    held.manifests[digest] = (OCI_MANIFEST, data)
    if index:
        child = {"mediaType": OCI_MANIFEST, "digest": digest, "size": len(data),
                 "platform": {"os": "linux", "architecture": "amd64"}}  # fmt: skip
        data = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [child]}).encode()
        digest = sha256(data)
        held.manifests[digest] = (OCI_INDEX, data)
    held.tags[tag] = digest
    return digest


@pytest.mark.parametrize("algorithm", keyring.ALGORITHMS)
@pytest.mark.parametrize("referrers", [True, False])
async def test_signed_and_found(algorithm: str, referrers: bool) -> None:
    async with PushableRegistry(referrers=referrers) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "team/tool", "1")
        location = parse_location(f"{sim.host}/team/tool:1")
        key, other = KEYS[algorithm], keyring.generate()
        with pytest.raises(VerificationError, match="not signed"):
            await verify(client, location, [public(key)])
        done = await sign(client, location, key, optional={"by": "me"})
        assert (done.digest, done.stored) == (digest, "referrers" if referrers else "tag")
        accepted = await verify(client, location, [public(other), public(key)])
        assert accepted.payload.digest == digest and dict(accepted.payload.optional) == {"by": "me"}
        with pytest.raises(VerificationError, match="another key"):
            await verify(client, location, [public(other)])
        await sign(client, location, other)
        await sign(client, location, key, optional={"by": "me"})
        assert len({s.payload async for s in Search(client, location, digest).found() if isinstance(s, Signature)}) == 2
        assert (await verify(client, location, [public(other)])).key.fingerprint == public(other).fingerprint
        held = sim.repositories["team/tool"]
        assert (signature_tag(digest) in held.tags) is not referrers
        assert signature_tag(digest) == f"sha256-{digest[7:]}.sig"


async def test_the_storage_is_cosigns() -> None:
    """What cosign 2 looks for: a tag, an image manifest, a payload layer, the signature in its annotation; and a subject."""
    async with PushableRegistry(referrers=True) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        await sign(client, parse_location(f"{sim.host}/t:1"), KEYS["ecdsa-p256"], storage="tag")
        await sign(client, parse_location(f"{sim.host}/t:1"), KEYS["ecdsa-p256"])
        held = sim.repositories["t"]
        tagged = json.loads(held.manifests[held.tags[f"sha256-{digest[7:]}.sig"]][1])
        assert tagged["config"]["mediaType"] == OCI_CONFIG and "subject" not in tagged
        referring = [m for m in (json.loads(data) for _, data in held.manifests.values()) if m.get("subject")]
        assert [m["subject"]["digest"] for m in referring] == [digest]
        assert referring[0]["artifactType"] == referring[0]["config"]["mediaType"] == REFERRER_TYPE
        for manifest in (tagged, referring[0]):
            (layer,) = manifest["layers"]
            assert layer["mediaType"] == PAYLOAD_TYPE == "application/vnd.dev.cosign.simplesigning.v1+json"
            payload = held.blobs[layer["digest"]]
            assert len(payload) == layer["size"]
            signature = base64.b64decode(layer["annotations"]["dev.cosignproject.cosign/signature"])
            assert public(KEYS["ecdsa-p256"]).verify(payload, signature)
            assert held.blobs[manifest["config"]["digest"]]


async def test_a_signature_does_not_travel(tmp_path: Path) -> None:
    """Neither to another repository, nor to another digest, nor through damage."""
    async with PushableRegistry() as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "good", "1")
        key = KEYS["ed25519"]
        await sign(client, parse_location(f"{sim.host}/good:1"), key)
        image(sim, "evil", "1")
        good, evil = sim.repositories["good"], sim.repositories["evil"]
        tag = signature_tag(digest)
        evil.tags[tag], evil.manifests = good.tags[tag], dict(good.manifests)
        evil.blobs |= good.blobs
        location = parse_location(f"{sim.host}/evil:1")
        with pytest.raises(VerificationError, match=f"another repository, {sim.host}/good"):
            await verify(client, location, [public(key)])
        assert await verify(client, location, [public(key)], identity=[f"{sim.host}/good"]), "a mirror may be allowed"
        other = image(sim, "good", "2", seed="other")
        good.tags[signature_tag(other)] = good.tags[tag]
        with pytest.raises(VerificationError, match="another digest"):
            await verify(client, parse_location(f"{sim.host}/good:2"), [public(key)])
        manifest = json.loads(good.manifests[good.tags[tag]][1])
        blob = manifest["layers"][0]["digest"]
        good.blobs[blob] = good.blobs[blob].replace(b"null", b"{}  ")
        with pytest.raises(VerificationError, match=r"no signature counts: .*digest"):
            await verify(client, parse_location(f"{sim.host}/good:1"), [public(key)])
        for signature in ("", "!!", base64.b64encode(b"x" * 600).decode()):
            manifest["layers"][0]["annotations"] = {SIGNATURE_ANNOTATION: signature}
            data = json.dumps(manifest).encode()
            good.manifests[sha256(data)] = (OCI_MANIFEST, data)
            good.tags[tag] = sha256(data)
            with pytest.raises(VerificationError, match="not signed"):
                await verify(client, parse_location(f"{sim.host}/good:1"), [public(key)])


async def test_layouts_are_signed_for_a_name(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    layout.create()
    data = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": [],
                       "config": {"mediaType": OCI_CONFIG, "digest": A, "size": 1}}).encode()  # fmt: skip
    layout.set_tag(layout.put(data, OCI_MANIFEST), "1")
    location, key = parse_location(f"oci:{tmp_path}:1"), KEYS["ed25519"]
    async with RegistryClient(QUICK) as client:
        with pytest.raises(BadReference, match="no repository"):
            await sign(client, location, key)
        await sign(client, location, key, identity="r.example/t")
        assert await verify(client, location, [public(key)], identity=["r.example/*"])
        with pytest.raises(VerificationError):
            await verify(client, location, [public(key)], identity=["r.example/x"])
        with pytest.raises(ConfigError):
            await sign(client, location, key, identity="r.example/t", storage="referrers")


# -- before anything is used -------------------------------------------------------------------------------------------


async def test_nothing_unsigned_is_resolved(tmp_path: Path) -> None:
    keyring.write_key_pair(str(tmp_path / "k"), KEYS["ed25519"])
    async with PushableRegistry() as sim, RegistryClient(QUICK) as client:
        host = sim.host
        policy = parse_policy(
            {"default": "deny", "rules": [{"match": f"{host}/free/*", "action": "allow"},
                                          {"match": f"{host}/team/**", "keys": [str(tmp_path / "k.pub")]}]}
        )  # fmt: skip
        for repository in ("free/a", "team/a", "team/b", "other"):
            image(sim, repository, "1", index=repository == "team/b")
        cache = MappingCache(str(tmp_path / "cache.db"))
        before = Resolver(client, cache, platform="linux/amd64")
        digests = {name: (await before.resolve(f"{host}/{name}:1")).digest for name in ("free/a", "team/a", "team/b", "other")}
        resolver = Resolver(client, cache, platform="linux/amd64", policy=policy, max_age=3600)
        assert (await resolver.resolve(f"{host}/free/a:1")).digest == digests["free/a"]
        for name, message in (("team/a", "not signed"), ("team/b", "not signed"), ("other", "allows nothing")):
            for text in (f"{host}/{name}:1", f"{host}/{name}@{digests[name]}"):
                with pytest.raises(VerificationError, match=message):
                    await resolver.resolve(text)
                with pytest.raises(VerificationError, match=message):
                    await resolver.resolve_all([f"{host}/free/a:1", text])
        for name in ("team/a", "team/b"):
            await sign(client, parse_location(f"{host}/{name}:1"), KEYS["ed25519"])
            assert (await resolver.resolve(f"{host}/{name}:1")).digest == digests[name]
        with pytest.raises(VerificationError):
            await Resolver(client, MappingCache(), platform="linux/amd64", policy=policy).resolve(f"{host}/other:1")
        asked = sim.count("registry")
        again = Resolver(client, cache, platform="linux/amd64", policy=policy, max_age=3600)
        await again.resolve_all([f"{host}/{name}:1" for name in ("team/a", "team/b", "free/a")])
        assert sim.count("registry") == asked, "what was accepted is remembered"
        image(sim, "team/a", "1", seed="moved")
        with pytest.raises(VerificationError, match="not signed"):
            await dataclasses.replace(again, max_age=0).resolve(f"{host}/team/a:1")
    away = Resolver(client, cache, platform="linux/amd64", policy=policy, max_age=0)
    assert (await away.resolve(f"{host}/team/b:1")).digest == digests["team/b"], "accepted before, the registry is away"
    stricter = parse_policy({"rules": [{"match": "**", "keys": [str(tmp_path / "k.pub")]}]})
    with pytest.raises(UnavailableError):
        await Resolver(client, cache, platform="linux/amd64", policy=stricter).resolve(f"{host}/free/a:1")
    await client.close()
    cache.close()


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from weenv.cli.main import cli

    runner = CliRunner()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_text("x")
    ref = f"oci:{tmp_path}/l:1"
    monkeypatch.setenv("WEENV_KEY_PASSWORD", "secret")

    def run(*arguments: str) -> dict[str, object]:
        result = runner.invoke(cli, ["group", *arguments, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        value: dict[str, object] = json.loads(result.output)
        return value

    built = run("build", ref, "--from", str(tree), "--kind", "tools", "--prefix", "opt")
    assert built["lazy"] is True
    made = run("keygen", str(tmp_path / "k"))
    assert run("sign", ref, "--key", f"{tmp_path}/k.key", "--identity", "r.example/t", "--annotation", "a=b")["stored"] == "tag"
    checked = run("verify", ref, "--key", f"{tmp_path}/k.pub", "--identity", "r.example/t")
    assert checked["fingerprint"] == made["fingerprint"] and checked["optional"] == {"a": "b"}
    (tmp_path / "p.yaml").write_text(
        json.dumps({"default": "deny", "rules": [{"match": "oci:/**", "keys": ["k.pub"], "identity": "r.example/*"}]})
    )
    assert run("verify", ref, "--policy", f"{tmp_path}/p.yaml")["accepted"] is True
    run("build", f"oci:{tmp_path}/l:2", "--from", str(tree), "--kind", "base")
    with pytest.raises(WeenvError, match="is not signed"):
        run("verify", f"oci:{tmp_path}/l:2", "--policy", f"{tmp_path}/p.yaml")
    assert run("diff", ref, f"oci:{tmp_path}/l:2", "--files")["files"] == {
        "added": ["f"], "removed": ["opt", "opt/f"], "changed": [],
    }  # fmt: skip
