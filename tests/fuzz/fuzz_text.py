"""Fuzz target: the texts that come from registries, images and configuration files.

Annotations of a layer, references, answers of token servers, docker's config.json, manifests, and the small files of a
layer directory. Whatever they hold, their parsers return or raise an error of the project's tree with one line of text.

``make fuzz`` runs all targets; weenv_testkit/fuzzing.py says how to run one. tests/test_fuzz_text.py runs a short pass.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

from weenv.core.digest import is_digest
from weenv.core.errors import WeenvError
from weenv.layer.foreign.formats import ForeignLayer
from weenv.layer.profile import decode, encode
from weenv.layer.verify import LAYER_ANNOTATION, SOURCE_ANNOTATION, TOC_ANNOTATION, parse_annotations, parse_source
from weenv.plugin.snapshotter.cache.reads import parse as parse_reads
from weenv.plugin.snapshotter.layerdir import LayerSource, Origin
from weenv.plugin.snapshotter.planes.base import Implied, LayerFacts, decode_attributes, encode_attributes
from weenv.registry.challenge import choose, parse_challenges, parse_token, token_request
from weenv.registry.credentials import DockerConfig
from weenv.registry.groupref.bundle import BUNDLE_TYPE, PAYLOAD_TYPE, parse_bundle, parse_statement
from weenv.registry.groupref.policy import make_payload, parse_payload
from weenv.registry.manifest import OCI_MANIFEST, parse_manifest
from weenv.registry.reference import parse_location
from weenv_testkit import fuzzing

DIGEST = "sha256:" + "ab" * 32


def annotations(text: str) -> None:
    """A layer's annotations, the three values one a line; what is accepted is what writing it gives."""
    values = text.split("\n", 2)
    named = dict(zip((LAYER_ANNOTATION, TOC_ANNOTATION, SOURCE_ANNOTATION), values, strict=False))
    descriptor = parse_annotations(named)
    assert descriptor is not None
    assert descriptor.annotations() == named
    assert 0 < descriptor.toc_length <= descriptor.size == descriptor.toc_offset + descriptor.toc_length < 1 << 63


def source(text: str) -> None:
    """The hint where a blob is."""
    host, repository = parse_source(text)
    assert f"{host}/{repository}" == text
    assert ".." not in repository.split("/")


def location(text: str) -> None:
    """A reference or a layout; its text means the same again."""
    found = parse_location(text)
    assert str(parse_location(str(found))) == str(found)


def challenge(text: str) -> None:
    """An answer's WWW-Authenticate headers, one a line, and what is asked for because of them."""
    chosen = choose(parse_challenges(text.split("\n")))
    if chosen is not None and chosen.scheme == "bearer":
        for identity in ("", "token"):
            token_request(chosen, "repository:a/b:pull", allow_plain=True, has_basic=True, identity_token=identity)


def token(text: str) -> None:
    """A token server's answer."""
    found = parse_token(text.encode("utf-8", "surrogatepass"), 0.0)
    assert 0 <= found.renew_at <= 86_400
    found.header.encode("ascii")


def credentials(text: str) -> None:
    """docker's config.json."""
    config = DockerConfig.parse(text.encode("utf-8", "surrogatepass"))
    config.helper_for("registry.example")
    config.inline("registry.example", "a/b")


def manifest(text: str) -> None:
    """A manifest or an index."""
    parse_manifest(text.encode("utf-8", "surrogatepass"))


def layer_source(text: str) -> None:
    """source.json; what is read can be written and read again."""
    found = LayerSource.from_json(text.encode("utf-8", "surrogatepass"))
    assert LayerSource.from_json(found.to_json()) == found


def facts(text: str) -> None:
    """facts.json."""
    LayerFacts.from_json(text.encode("utf-8", "surrogatepass"))


def attributes(text: str) -> None:
    """Attributes of implied directories, as stored."""
    decode_attributes(text)


def bundle(text: str) -> None:
    """A sigstore bundle."""
    found = parse_bundle(text.encode("utf-8", "surrogatepass"))
    assert 0 < len(found.signature) <= 512


def statement(text: str) -> None:
    """What a bundle's key has signed."""
    said = parse_statement(text.encode("utf-8", "surrogatepass"))
    assert is_digest(said.digest)
    assert not said.reference or str(parse_location(said.reference)).startswith(said.reference)


def payload(text: str) -> None:
    """What a signature of the simple kind is over."""
    said = parse_payload(text.encode("utf-8", "surrogatepass"))
    assert is_digest(said.digest)
    assert said.reference


def profile(text: str) -> None:
    """A read profile of a layer of 5000 frames, and the record of its reads that a file may hold."""
    frames = [frame for run in decode(text, 5000) for frame in range(run.first, run.end)]
    assert 0 < len(frames) == len(set(frames))
    assert 0 <= min(frames) <= max(frames) < 5000
    parse_reads(text.encode("utf-8", "surrogatepass"), 5000)


PARSERS: tuple[Callable[[str], None], ...] = (
    annotations, source, location, challenge, token, credentials, manifest, layer_source, facts, attributes,
    bundle, statement, payload, profile,
)  # fmt: skip
_DESCRIPTOR = {"mediaType": "application/vnd.oci.image.layer.v1.tar+zstd", "digest": DIGEST, "size": 1000}
SEEDS: tuple[tuple[str, ...], ...] = (
    (f"{DIGEST},1000\n900,100,{DIGEST}\nregistry.example:5000/a/b-c", f"{DIGEST},1000\n900,100,{DIGEST}"),
    ("registry.example/a", "[::1]:5000/a/b", "localhost:1/x__y/z"),
    ("debian", "registry.example:5000/a/b:tag", f"a@{DIGEST}", "oci:/var/x:tag", "[::1]:5/a", f"h.example/a:t@{DIGEST}"),
    (
        'Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull"',
        'Basic realm="x\\"y"\nNegotiate abc==, Bearer realm="https://[::1]/t"',
    ),
    ('{"token": "abc", "expires_in": 300, "issued_at": "2026-01-01T00:00:00Z"}', '{"access_token": "x"}'),
    (
        json.dumps({"auths": {"registry.example": {"auth": "dTpw"}, "https://x/v1/": {}}, "credsStore": "pass"}),
        json.dumps({"credHelpers": {"registry.example": "x"}, "auths": {"registry.example/a": {"identitytoken": "t"}}}),
    ),
    (
        json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": _DESCRIPTOR, "layers": [_DESCRIPTOR] * 2}),
        json.dumps({"schemaVersion": 2, "manifests": [{**_DESCRIPTOR, "platform": {"os": "linux", "architecture": "amd64"}}]}),
    ),
    (
        LayerSource(DIGEST, 1000, 900, 100, DIGEST, [Origin("registry", "h", "r"), Origin("file", path="/x")])
        .to_json()
        .decode(),
        LayerSource(DIGEST, 1000, 800, 70, DIGEST, [], ForeignLayer("zstd:chunked", DIGEST, 1000, DIGEST, 808, 100, 900))
        .to_json()
        .decode(),
    ),
    (LayerFacts(DIGEST, (Implied(3, b"a/b", 512),)).to_json().decode(),),
    (encode_attributes({}), '[[1,493,0,0,5,6,[["61","62"]]]]'),
    (
        json.dumps({"mediaType": BUNDLE_TYPE, "verificationMaterial": {"publicKey": {"hint": "eA=="}},
                    "dsseEnvelope": {"payload": "e30=", "payloadType": PAYLOAD_TYPE, "signatures": [{"sig": "eA=="}]}}),
        json.dumps({"mediaType": BUNDLE_TYPE, "verificationMaterial": {"certificate": {"rawBytes": "eA=="}},
                    "messageSignature": {"messageDigest": {"algorithm": "SHA2_256", "digest": "eA=="}, "signature": "eA=="}}),
    ),
    (
        json.dumps({"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://sigstore.dev/cosign/sign/v1",
                    "subject": [{"digest": {"sha256": DIGEST[7:]}, "annotations": {"docker-reference": "r.example/a"}}]}),
    ),
    (make_payload("registry.example:5000/a/b", DIGEST, {"a": "b"}).decode(),),
    (encode([(0, 7), (1, 8), (1, 9), (5, 0)]).value, encode((frame % 90, frame * 3) for frame in range(900)).value),
)  # fmt: skip
PIECES = (
    *("\0", "\n", "\r\n", " ", ",", "/", "//", "..", ":", "@", "-", "_", "__", "%2f", "=", '"', "\\", "{", "}", "[", "]"),
    *("0", "-1", "1e999", "1" * 30, "9" * 400, "NaN", "Infinity", "null", "true", "{}", "[]", '""', "[" * 2000, "x" * 5000),
    *("\ud800", "\\ud800", "\\u0000", "é", "\u2028", "\u0661", "A", "sha256:", "sha512:", DIGEST),
)


def one_input(data: bytes) -> bool:
    """The first byte chooses the parser; true where it accepts the rest. AssertionError, or any other, is a failure."""
    if not data:
        return False
    parser = PARSERS[data[0] % len(PARSERS)]
    try:
        parser(_lenient(data[1:]))
    except WeenvError as error:
        assert str(error)
        assert "\n" not in str(error), error
        assert len(str(error)) < 8192
        return False
    return True


def _lenient(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def mutate(text: str, dice: random.Random) -> str:
    """Change a text in a few places."""
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(text) + 1)
        upto = min(len(text), at + dice.choice((0, 0, 1, 1, 2, 8, 64)))
        action = dice.randrange(4)
        if action == 0:
            new = dice.choice(PIECES)
        elif action == 1:
            new = chr(dice.choice((dice.randrange(128), dice.randrange(0x3000))))
        elif action == 2:
            new = ""
        else:
            begin = dice.randrange(len(text) + 1)
            new = text[begin : begin + dice.randrange(40)]
        text = text[:at] + new + text[upto:]
    return text


def run(count: int, seed: int) -> str:
    """``count`` mutations of sound texts."""
    dice = random.Random(seed)
    accepted = 0
    for number, texts in enumerate(SEEDS):
        for text in texts:
            assert one_input(bytes([number]) + text.encode()), f"{PARSERS[number].__name__}: {text} is sound"
    for _ in range(count):
        number = dice.randrange(len(PARSERS))
        text = mutate(dice.choice(SEEDS[number]), dice)
        data = bytes([number]) + text.encode("utf-8", "surrogatepass")
        try:
            accepted += one_input(data)
        except BaseException:
            print(f"{PARSERS[number].__name__}: {data!r}", file=sys.stderr)
            raise
    return f"{accepted} of them sound"


def mutator(atheris: Any, data: bytes, max_size: int, seed: int) -> bytes:
    """Half of atheris' own mutations, half of ours; now and then from a sound text."""
    if seed % 2:
        return bytes(atheris.Mutate(data, max_size))
    dice = random.Random(seed)
    if not data or dice.random() < 0.1:
        number = dice.randrange(len(PARSERS))
        return (bytes([number]) + dice.choice(SEEDS[number]).encode())[:max_size]
    return (data[:1] + mutate(_lenient(data[1:]), dice).encode("utf-8", "surrogatepass"))[:max_size]


if __name__ == "__main__":
    fuzzing.main(__doc__, one_input, run, mutator)
