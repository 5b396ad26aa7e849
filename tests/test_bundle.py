"""registry/groupref/bundle.py: sigstore bundles as cosign 3 writes them, read and judged by a key; and where they are found."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.pushable import PushableRegistry, Repository
from test_sign import KEYS, QUICK, image, public

from weenv.core.digest import sha256
from weenv.core.errors import FormatError, SourceError, VerificationError
from weenv.registry.client import RegistryClient
from weenv.registry.groupref import keys as keyring
from weenv.registry.groupref import search as searching
from weenv.registry.groupref.bundle import BUNDLE_TYPE, MAX_BUNDLE, encode, parse_bundle, parse_statement
from weenv.registry.groupref.policy import Payload, Signature, check_signatures
from weenv.registry.groupref.search import MAX_PAGES, MAX_TAGGED, REFERRER_TYPE, Search, referrers_tag, signature_tag
from weenv.registry.groupref.sign import sign, verify
from weenv.registry.layout import Layout
from weenv.registry.manifest import OCI_INDEX, OCI_MANIFEST
from weenv.registry.reference import parse_location

A = sha256(b"a")
EMPTY = "application/vnd.oci.empty.v1+json"
SIGN = "https://sigstore.dev/cosign/sign/v1"
INTOTO = "application/vnd.in-toto+json"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def statement(digest: str, annotations: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """What cosign 3 signs."""
    subject: dict[str, Any] = {"digest": {"sha256": digest.removeprefix("sha256:")}}
    if annotations is not None:
        subject["annotations"] = annotations
    made = {"_type": "https://in-toto.io/Statement/v1", "subject": [subject], "predicateType": SIGN, "predicate": {}}
    return made | changes


def envelope(key: keyring.PrivateKey, payload: bytes, material: dict[str, Any] | None = None) -> dict[str, Any]:
    """A bundle with a DSSE envelope; what is signed is spelt out here, as protocol.md does."""
    signed = b"DSSEv1 28 application/vnd.in-toto+json " + str(len(payload)).encode() + b" " + payload
    return {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": material or {"publicKey": {"hint": b64(b"hint")}},
        "dsseEnvelope": {"payload": b64(payload), "payloadType": INTOTO,
                         "signatures": [{"sig": b64(keyring.sign(key, signed))}]},
    }  # fmt: skip


def bundle_of(key: keyring.PrivateKey, said: dict[str, Any], material: dict[str, Any] | None = None) -> bytes:
    return json.dumps(envelope(key, json.dumps(said).encode(), material)).encode()


def judge(data: bytes, *keys: keyring.PublicKey, names: tuple[str, ...] = ("**",), subject: bytes = b"") -> str:
    """The name for which a bundle counts."""
    found = check_signatures([parse_bundle(data).over(subject)], [A], names, keys, "x")
    assert found.payload.digest == A
    return found.payload.reference


def test_the_encoding_is_dsses() -> None:
    """The example of its protocol.md."""
    assert encode("http://example.com/HelloWorld", b"hello world") == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


@pytest.mark.parametrize("algorithm", keyring.ALGORITHMS)
def test_a_key_decides(algorithm: str) -> None:
    key, other = KEYS[algorithm], keyring.generate(algorithm)
    data = bundle_of(key, statement(A))
    assert judge(data, public(other), public(key)) == ""
    with pytest.raises(VerificationError, match="another key"):
        judge(data, public(other))
    named = bundle_of(key, statement(A, {"docker-reference": "R.example/team/tool".lower(), "by": 1}))
    assert judge(named, public(key), names=("r.example/team/*",)) == "r.example/team/tool"
    with pytest.raises(VerificationError, match=r"another repository, r\.example/team/tool"):
        judge(named, public(key), names=("r.example/team",))


def test_an_ed25519_signature_of_cosign_3_1_is_named() -> None:
    """It is by another scheme; made here as any signature that does not verify, with the hint that cosign writes."""
    for key, message in ((KEYS["ed25519"], "use an ECDSA key"), (KEYS["ecdsa-p256"], "another key, or altered")):
        hint = {"publicKey": {"hint": b64(bytes.fromhex(public(key).fingerprint))}}
        data = bundle_of(keyring.generate(), statement(A), hint)
        with pytest.raises(VerificationError, match=message):
            judge(data, public(keyring.generate()), public(key))
        with pytest.raises(VerificationError, match="another key, or altered"):
            judge(data, public(keyring.generate("ed25519")))
        assert judge(bundle_of(key, statement(A), hint), public(key)) == ""


def test_what_names_no_repository_needs_to_be_allowed() -> None:
    data = bundle_of(KEYS["ed25519"], statement(A))
    for names in (("r.example/a",), ("r.example/**", "*"), ()):
        with pytest.raises(VerificationError, match="for no repository") as caught:
            judge(data, public(KEYS["ed25519"]), names=names)
        assert "-a docker-reference=" in caught.value.hint
        assert "**" in caught.value.hint


def test_what_is_no_signature_of_this_image_is_named() -> None:
    key = KEYS["ed25519"]
    good = statement(A)
    twice = statement(A, {"docker-reference": "r.example/a"})
    twice["subject"][0]["name"] = "r.example/b"
    for said, message in (
        (good | {"predicateType": "https://slsa.dev/provenance/v1"}, "an attestation, 'https://slsa.dev/provenance/v1'"),
        (good | {"predicateType": None}, "an attestation"),
        (good | {"_type": "https://in-toto.io/Statement/v0.1"}, "unknown type"),
        (good | {"subject": good["subject"] * 2}, "not about one image"),
        (good | {"subject": []}, "not about one image"),
        (good | {"subject": [{"digest": {"sha512": "ab"}}]}, "names no image"),
        (good | {"subject": [{"digest": {"sha256": A}}]}, "names no image"),
        (good | {"subject": [{"digest": A}]}, "names no image"),
        (statement(sha256(b"b")), "another digest"),
        (statement(A, {"docker-reference": "NO/NAME"}), "names no repository"),
        *((statement(A, {"docker-reference": value}), "names no repository") for value in (7, ["r.example/a"], {}, True)),
        (twice, "names two repositories"),
    ):  # fmt: skip
        with pytest.raises(VerificationError, match=message):
            judge(bundle_of(key, said), public(key))


def test_a_name_of_the_subject_counts() -> None:
    said = statement(A, {"docker-reference": "r.example/a"})
    said["subject"][0]["name"] = "r.example/a:latest"
    assert judge(bundle_of(KEYS["ed25519"], said), public(KEYS["ed25519"]), names=("r.example/a",)) == "r.example/a"
    del said["subject"][0]["annotations"]
    assert judge(bundle_of(KEYS["ed25519"], said), public(KEYS["ed25519"]), names=("r.example/a",)) == "r.example/a"


@pytest.mark.parametrize("algorithm", keyring.ALGORITHMS)
def test_a_manifest_signed_itself(algorithm: str) -> None:
    """A messageSignature is over the manifest; it binds the manifest that was read, whatever digest it claims."""
    key, subject = KEYS[algorithm], b"a"
    made = {
        "mediaType": BUNDLE_TYPE, "verificationMaterial": {"publicKey": {}},
        "messageSignature": {"messageDigest": {"algorithm": "SHA2_256", "digest": b64(b"x")},
                             "signature": b64(keyring.sign(key, subject))},
    }  # fmt: skip
    data = json.dumps(made).encode()
    assert judge(data, public(key), subject=subject) == ""
    with pytest.raises(VerificationError, match="another key, or altered"):
        judge(data, public(key), subject=b"b")
    with pytest.raises(VerificationError, match="no repository"):
        judge(data, public(key), subject=subject, names=("r.example/a",))


@pytest.mark.parametrize(
    "material",
    [{"certificate": {"rawBytes": b64(b"x")}}, {"x509CertificateChain": {"certificates": [{"rawBytes": b64(b"x")}]}}],
)
def test_keyless_ones_are_named(material: dict[str, Any]) -> None:
    key = keyring.generate()
    data = bundle_of(key, statement(A), material)
    with pytest.raises(VerificationError, match="signed without a key, by a certificate") as caught:
        judge(data, public(KEYS["ed25519"]))
    assert "cosign sign --key" in str(caught.value)
    assert judge(data, public(key)) == "", "the certificate's own key is known: it is a signature by that"


def _changed(change: Any) -> bytes:
    raw = envelope(KEYS["ed25519"], json.dumps(statement(A)).encode())
    change(raw)
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("mediaType"), "unknown version"),
        (lambda b: b.update(mediaType="application/vnd.dev.sigstore.bundle.v0.4+json"), r"unknown version .*v0\.4"),
        (lambda b: b.update(mediaType=BUNDLE_TYPE + "\n"), "unknown version"),
        (lambda b: b.pop("verificationMaterial"), "has no verificationMaterial"),
        (lambda b: b.update(verificationMaterial={}), "neither key nor certificate"),
        (lambda b: b.pop("dsseEnvelope"), "either dsseEnvelope or messageSignature"),
        (lambda b: b.update(messageSignature={"signature": "AA=="}), "either dsseEnvelope or messageSignature"),
        (lambda b: b.update(dsseEnvelope=[]), "has no dsseEnvelope"),
        (lambda b: b["dsseEnvelope"].update(payloadType="text/plain"), "no in-toto statement"),
        (lambda b: b["dsseEnvelope"].update(signatures=[]), "exactly one signature"),
        (lambda b: b["dsseEnvelope"].update(signatures=b["dsseEnvelope"]["signatures"] * 2), "exactly one signature"),
        (lambda b: b["dsseEnvelope"].update(signatures=[{"sig": "!"}]), "not base64"),
        (lambda b: b["dsseEnvelope"].update(signatures=[{"sig": "é"}]), "not base64"),
        (lambda b: b["dsseEnvelope"].update(signatures=[{"sig": b64(b"x" * 513)}]), "of 1 to 512 bytes"),
        (lambda b: b["dsseEnvelope"].update(signatures=[{}]), "has no sig"),
        (lambda b: b["dsseEnvelope"].update(payload=b64(b"x" * (65 << 10))), "has no payload of 1 to 65536 bytes"),
        (lambda b: b.update(more="x" * MAX_BUNDLE), "larger than"),
    ],
)
def test_malformed_bundles(change: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_bundle(_changed(change))


def test_a_key_twice_is_refused() -> None:
    data = bundle_of(KEYS["ed25519"], statement(A))
    with pytest.raises(FormatError, match="same key twice"):
        parse_bundle(data.replace(b'"dsseEnvelope"', b'"dsseEnvelope": {}, "dsseEnvelope"', 1))


FIELDS = [
    *("mediaType", "verificationMaterial", "publicKey", "certificate", "dsseEnvelope", "payload", "payloadType", "signatures"),
    *("sig", "messageSignature", "signature"),
    *("_type", "predicateType", "subject", "digest", "sha256", "annotations", "name", "docker-reference"),
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=20)
    | st.sampled_from([A, SIGN, INTOTO, BUNDLE_TYPE, b64(b"x")]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
def test_junk_is_a_format_error(data: bytes) -> None:
    for parse in (parse_bundle, parse_statement):
        try:
            parse(data)
        except FormatError as error:
            assert "\n" not in str(error)


def change(place: Any, data: st.DataObject, value: Any) -> None:
    """Put ``value`` in one place of a JSON value."""
    while True:
        name = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not place[name] or not isinstance(place[name], dict | list) or data.draw(st.booleans()):
            break
        place = place[name]
    place[name] = value


@given(st.data(), values)
def test_something_else_in_one_place(data: st.DataObject, value: Any) -> None:
    """A bundle that was changed in one place, outside of what is signed, is refused or says the same."""
    raw = envelope(KEYS["ed25519"], json.dumps(statement(A)).encode())
    change(raw, data, value)
    try:
        found = parse_bundle(json.dumps(raw).encode()).over(b"")
        accepted = check_signatures([found], [A], ["**"], [public(KEYS["ed25519"])], "x")
    except FormatError:
        return
    assert accepted.payload == Payload("", A, {})


@given(st.data(), values)
def test_something_else_in_what_is_signed(data: st.DataObject, value: Any) -> None:
    """A key may sign anything: it is refused, or names this image and one repository or none."""
    said = statement(A, {"docker-reference": "r.example/a"})
    change(said, data, value)
    try:
        found = judge(bundle_of(KEYS["ed25519"], said), public(KEYS["ed25519"]))
    except FormatError as error:
        assert "\n" not in str(error)
        return
    assert found == "" or "/" in found


@given(st.integers(0, 2000), st.integers(1, 255), st.sampled_from(keyring.ALGORITHMS))
def test_a_changed_byte_never_passes(position: int, change: int, algorithm: str) -> None:
    key = KEYS[algorithm]
    found = parse_bundle(bundle_of(key, statement(A))).over(b"")
    assert found.signed is not None
    whole = bytearray(found.signed + found.signature)
    whole[position % len(whole)] ^= change
    altered = Signature(found.payload, bytes(whole[len(found.signed) :]), bytes(whole[: len(found.signed)]), found.read)
    with pytest.raises(VerificationError):
        check_signatures([altered], [A], ["**"], [public(key)], "x")


# -- beside what they sign -------------------------------------------------------------------------------------------


def attach(
    held: Repository, digest: str, data: bytes, *, annotations: dict[str, str] | None = None,
    listed: dict[str, Any] | None = None, layer: str = BUNDLE_TYPE, subject: str = "", kind: str = BUNDLE_TYPE, times: int = 1,
) -> None:  # fmt: skip
    """Store a bundle as cosign does: a referrer; and, with the fields ``listed`` in its row, under the tag that lists them."""
    held.blobs[sha256(b"{}")] = b"{}"
    held.blobs[sha256(data)] = data
    manifest = {
        "schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": kind,
        "config": {"mediaType": EMPTY, "size": 2, "digest": sha256(b"{}")},
        "layers": [{"mediaType": layer, "size": len(data), "digest": sha256(data)}] * times,
        "subject": {"mediaType": OCI_MANIFEST, "size": 5, "digest": subject or digest},
        "annotations": annotations or {},
    }  # fmt: skip
    raw = json.dumps(manifest).encode()
    held.manifests[sha256(raw)] = (OCI_MANIFEST, raw)
    if listed is not None:
        old = held.manifests.get(held.tags.get(referrers_tag(digest), ""))
        rows = json.loads(old[1])["manifests"] if old else []
        rows.append({"mediaType": OCI_MANIFEST, "digest": sha256(raw), "size": len(raw), **listed})
        index = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": rows}).encode()
        held.manifests[sha256(index)] = (OCI_INDEX, index)
        held.tags[referrers_tag(digest)] = sha256(index)


@pytest.mark.parametrize(
    ("listed", "filters"),
    [(None, True), (None, False), ({"artifactType": BUNDLE_TYPE}, True), ({"artifactType": EMPTY}, True), ({}, True)],
)
@pytest.mark.parametrize("algorithm", keyring.ALGORITHMS)
async def test_found_where_cosign_puts_them(algorithm: str, listed: dict[str, Any] | None, filters: bool) -> None:
    """By the referrers API, and in the list under a tag where there is none (with the types that clients write there)."""
    async with PushableRegistry(referrers=listed is None, filters=filters) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "team/tool", "1")
        location = parse_location(f"{sim.host}/team/tool:1")
        key, held = KEYS[algorithm], sim.repositories["team/tool"]
        named = statement(digest, {"docker-reference": f"{sim.host}/team/tool", "by": "me"})
        with pytest.raises(VerificationError, match="not signed"):
            await verify(client, location, [public(key)])
        attach(held, digest, bundle_of(key, statement(digest)), listed=listed)
        with pytest.raises(VerificationError, match="for no repository"):
            await verify(client, location, [public(key)])
        assert (await verify(client, location, [public(key)], identity=["**"])).payload.reference == ""
        attach(held, digest, bundle_of(key, named), listed=listed)
        accepted = await verify(client, location, [public(keyring.generate()), public(key)])
        assert accepted.payload.digest == digest
        assert accepted.payload.optional["by"] == "me"
        # Beside what we sign ourselves, and not instead.
        other = keyring.generate()
        await sign(client, location, other)
        assert (await verify(client, location, [public(other)])).key.fingerprint == public(other).fingerprint
        assert (await verify(client, location, [public(key)])).payload.optional["by"] == "me"
        assert len([each async for each in Search(client, location, digest).found()]) == 3


@pytest.mark.parametrize("referrers", [True, False])
async def test_a_bundle_does_not_travel(referrers: bool) -> None:
    async with PushableRegistry(referrers=referrers) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "good", "1")
        key, good = KEYS["ed25519"], sim.repositories["good"]
        attach(good, digest, bundle_of(key, statement(digest, {"docker-reference": f"{sim.host}/good"})), listed={})
        image(sim, "evil", "1")
        evil = sim.repositories["evil"]
        evil.blobs |= good.blobs
        evil.manifests |= good.manifests
        evil.tags |= good.tags
        location = parse_location(f"{sim.host}/evil:1")
        with pytest.raises(VerificationError, match=f"another repository, {sim.host}/good"):
            await verify(client, location, [public(key)])
        assert await verify(client, location, [public(key)], identity=[f"{sim.host}/good"]), "a mirror may be allowed"
        # Moved to another image: what lists it is about that, what is signed is not; or what is listed is not about it, either.
        other = image(sim, "good", "2", seed="other")
        two = parse_location(f"{sim.host}/good:2")
        data = bundle_of(key, statement(digest, {"docker-reference": f"{sim.host}/good"}))
        attach(good, other, data, listed={}, subject=digest)
        with pytest.raises(VerificationError, match="not signed"):
            await verify(client, two, [public(key)])
        attach(good, other, data, listed={})
        with pytest.raises(VerificationError, match="another digest"):
            await verify(client, two, [public(key)])


@pytest.mark.parametrize("referrers", [True, False])
async def test_others_beside_it_are_passed_by(referrers: bool) -> None:
    """Attestations that say so are not fetched; a bundle that is of no use is named, and does not keep others from counting."""
    async with PushableRegistry(referrers=referrers) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        key, held = KEYS["ed25519"], sim.repositories["t"]
        location = parse_location(f"{sim.host}/t:1")
        provenance = "https://slsa.dev/provenance/v1"
        said = statement(digest, predicateType=provenance)
        attach(held, digest, b"gone", listed={}, annotations={"dev.sigstore.bundle.predicateType": provenance})
        del held.blobs[sha256(b"gone")]
        with pytest.raises(VerificationError, match="is not signed"):
            await verify(client, location, [public(key)], identity=["**"])
        attach(held, digest, bundle_of(key, said), listed={})
        attach(held, digest, b"x" * (MAX_BUNDLE + 1), listed={})
        attach(held, digest, b"{}", listed={})
        attach(held, digest, bundle_of(key, statement(digest)), listed={}, layer="application/octet-stream")
        with pytest.raises(VerificationError, match="no signature counts: ") as caught:
            await verify(client, location, [public(key)], identity=["**"])
        for reason in ("is an attestation", f"larger than {MAX_BUNDLE} bytes", "unknown version"):
            assert reason in str(caught.value)
        attach(held, digest, bundle_of(key, statement(digest)), listed={})
        assert await verify(client, location, [public(key)], identity=["**"])


@pytest.mark.parametrize("referrers", [True, False])
async def test_a_manifest_signed_itself_is_read_for_it(referrers: bool) -> None:
    async with PushableRegistry(referrers=referrers) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1", index=True)
        key, held = KEYS["ecdsa-p256"], sim.repositories["t"]
        made = {"mediaType": BUNDLE_TYPE, "verificationMaterial": {"publicKey": {}},
                "messageSignature": {"signature": b64(keyring.sign(key, held.manifests[digest][1]))}}  # fmt: skip
        attach(held, digest, json.dumps(made).encode(), listed={})
        location = parse_location(f"{sim.host}/t:1")
        assert (await verify(client, location, [public(key)], identity=["**"])).payload.digest == digest
        made["messageSignature"] = {"signature": b64(keyring.sign(key, b"something else"))}
        second = image(sim, "t", "2", seed="2")
        attach(held, second, json.dumps(made).encode(), listed={})
        with pytest.raises(VerificationError, match="another key, or altered"):
            await verify(client, parse_location(f"{sim.host}/t:2"), [public(key)], identity=["**"])


ROW = {"mediaType": OCI_MANIFEST, "digest": A, "size": 1, "artifactType": BUNDLE_TYPE}
NO_MANIFESTS = [b"junk", b"{}", b"[]", json.dumps({"mediaType": OCI_MANIFEST, "layers": [7], "config": {}}).encode()]


@pytest.mark.parametrize("referrers", [True, False])
async def test_malformed_rows_hide_no_other(referrers: bool) -> None:
    """Whoever may push can have them listed: they are worth as much as no signature."""
    rows: list[Any] = [
        {**ROW, **changed}
        for changed in (
            {"digest": "sha256:zz"}, {"digest": "sha512:" + "0" * 128}, {"digest": 7}, {"size": -1}, {"size": 1 << 62},
            {"size": "1"}, {"size": True}, {"mediaType": 7}, {"mediaType": "x/y"}, {"mediaType": OCI_INDEX},
            {"annotations": {"dev.sigstore.bundle.predicateType": 7}}, {"annotations": []}, {"Digest": A},
            {"artifactType": []}, {"artifactType": {}},
        )
    ]  # fmt: skip
    rows += [7, None, [], "x"]
    async with PushableRegistry(referrers=referrers, listed=rows) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        held = sim.repositories["t"]
        attach(held, digest, bundle_of(KEYS["ed25519"], statement(digest)), listed={})
        if not referrers:
            listed = json.loads(held.manifests[held.tags[referrers_tag(digest)]][1])
            listed["manifests"] = [*rows, *listed["manifests"]]
            data = json.dumps(listed).encode()
            held.manifests[sha256(data)] = (OCI_INDEX, data)
            held.tags[referrers_tag(digest)] = sha256(data)
        location = parse_location(f"{sim.host}/t:1")
        assert await verify(client, location, [public(KEYS["ed25519"])], identity=["**"])


@pytest.mark.parametrize("referrers", [True, False])
async def test_a_layer_shorter_than_it_says_hides_no_other(referrers: bool) -> None:
    async with PushableRegistry(referrers=referrers) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        held, key = sim.repositories["t"], KEYS["ed25519"]
        location = parse_location(f"{sim.host}/t:1")
        for number in range(3):
            lying = bundle_of(key, {**statement(digest), "x": number})
            attach(held, digest, lying, listed={})
            held.blobs[sha256(lying)] = lying[: len(lying) // 2]
        with pytest.raises((VerificationError, SourceError)):
            await verify(client, location, [public(key)], identity=["**"])
        attach(held, digest, bundle_of(key, statement(digest)), listed={})
        assert await verify(client, location, [public(key)], identity=["**"])


@pytest.mark.parametrize("raw", NO_MANIFESTS)
@pytest.mark.parametrize("referrers", [True, False])
async def test_tags_that_mean_no_manifest_hide_no_other(raw: bytes, referrers: bool) -> None:
    async with PushableRegistry(referrers=referrers) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        held, key = sim.repositories["t"], KEYS["ed25519"]
        location = parse_location(f"{sim.host}/t:1")
        junk = sha256(raw)
        if referrers:
            attach(held, digest, bundle_of(key, statement(digest)))
            held.tags[signature_tag(digest)] = held.tags[referrers_tag(digest)] = junk
        else:
            await sign(client, location, key)
            held.tags[referrers_tag(digest)] = junk
        held.manifests[junk] = (OCI_MANIFEST, raw)
        assert await verify(client, location, [public(key)], identity=["**"])


@pytest.mark.parametrize("referrers", [True, False])
async def test_a_crowd_hides_no_other(referrers: bool) -> None:
    """Neither many of one kind those of another, nor those that say nothing the ones that say they are signatures, nor
    the many layers of one manifest the first of the next."""
    async with PushableRegistry(referrers=referrers, filters=False, page=50) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        key, held, signs = KEYS["ed25519"], sim.repositories["t"], {"dev.sigstore.bundle.predicateType": SIGN}
        location = parse_location(f"{sim.host}/t:1")
        for number in range(MAX_TAGGED + 6):
            for kind in (BUNDLE_TYPE, REFERRER_TYPE):
                attach(held, digest, b"junk%d" % number, listed={"artifactType": kind}, kind=kind)
        attach(held, digest, b"many", listed={"artifactType": BUNDLE_TYPE, "annotations": signs}, annotations=signs, times=70)
        with pytest.raises(VerificationError, match="and more exist"):
            await verify(client, location, [public(key)], identity=["**"])
        data = bundle_of(key, statement(digest))
        attach(held, digest, data, listed={"artifactType": BUNDLE_TYPE, "annotations": signs}, annotations=signs)
        assert await verify(client, location, [public(key)], identity=["**"])


@pytest.mark.parametrize("referrers", [True, False])
async def test_a_crowd_that_says_it_signs_hides_no_other(referrers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may push can say so; the right one is found among them, or it is said that not all were looked at."""
    async with PushableRegistry(referrers=referrers, page=50) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        key, other, held = KEYS["ed25519"], keyring.generate(), sim.repositories["t"]
        signs = {"dev.sigstore.bundle.predicateType": SIGN}
        location = parse_location(f"{sim.host}/t:1")
        listed = {"artifactType": BUNDLE_TYPE, "annotations": signs}
        for number in range(100):  # as good as the right one, but for the key
            attach(held, digest, bundle_of(other, {**statement(digest), "x": number}), listed=listed, annotations=signs)
        with pytest.raises(VerificationError, match="no signature counts"):
            await verify(client, location, [public(key)], identity=["**"])
        longer = {**statement(digest), "x": 1000}
        attach(held, digest, bundle_of(key, longer), listed=listed, annotations=signs)
        assert await verify(client, location, [public(key)], identity=["**"])
        monkeypatch.setattr(searching, "MAX_LOOKED", 40)
        with pytest.raises(VerificationError, match=r"none of the first 40 signatures counts, and more exist, .* another key"):
            await verify(client, location, [public(keyring.generate())], identity=["**"])
        await sign(client, location, key, storage="tag")
        sim.seen.clear()
        assert await verify(client, location, [public(key)]), "the tag is looked at first"
        assert sim.count("registry", "GET", "/referrers/") == 0


async def test_a_crowd_costs_no_more_than_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MAX_TRAFFIC", 20_000)
    async with PushableRegistry(referrers=True) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        held, key = sim.repositories["t"], KEYS["ed25519"]
        for number in range(30):
            attach(held, digest, bundle_of(key, {**statement(digest), "x": number}))
        search = Search(client, parse_location(f"{sim.host}/t:1"), digest)
        assert 0 < len([each async for each in search.found()]) < 30
        assert search.more


@pytest.mark.parametrize("before", [0, 1, 4])
async def test_pages_of_referrers_are_followed(before: int) -> None:
    """By whatever parameters the registry gives; and not for ever."""
    async with PushableRegistry(referrers=True, page=1) as sim, RegistryClient(QUICK) as client:
        digest = image(sim, "t", "1")
        held, key = sim.repositories["t"], KEYS["ed25519"]
        location = parse_location(f"{sim.host}/t:1")
        for number in range(before):
            attach(held, digest, b"junk%d" % number)
        attach(held, digest, bundle_of(key, statement(digest)))
        assert await verify(client, location, [public(key)], identity=["**"])
        for number in range(3 * MAX_PAGES):
            attach(held, digest, b"more%d" % number)
        sim.seen.clear()
        assert [each async for each in Search(client, location, digest).found()]
        assert sim.count("registry", "GET", "/referrers/") == MAX_PAGES + 1, "one empty page of the other kind"


async def test_a_list_of_referrers_in_a_layout(tmp_path: Any) -> None:
    """As copied there with its tag."""
    layout = Layout(str(tmp_path))
    layout.create()
    held = Repository()
    subject = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": [],
                          "config": {"mediaType": EMPTY, "digest": sha256(b"{}"), "size": 2}}).encode()  # fmt: skip
    descriptor = layout.put(subject, OCI_MANIFEST)
    layout.set_tag(descriptor, "1")
    key = KEYS["ed25519"]
    said = statement(descriptor.digest, {"docker-reference": "r.example/t"})
    attach(held, descriptor.digest, bundle_of(key, said), listed={})
    for data in held.blobs.values():
        layout.put(data, "application/octet-stream")
    for kind, data in held.manifests.values():
        made = layout.put(data, kind)
        if kind == OCI_INDEX:
            layout.set_tag(made, referrers_tag(descriptor.digest))
    location = parse_location(f"oci:{tmp_path}:1")
    async with RegistryClient(QUICK) as client:
        assert await verify(client, location, [public(key)], identity=["r.example/*"])
        with pytest.raises(VerificationError, match="another repository"):
            await verify(client, location, [public(key)], identity=["r.example/x"])
