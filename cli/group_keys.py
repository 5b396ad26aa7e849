"""``weenv group keygen|sign|verify``: signatures as cosign makes them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import click

from weenv.cli import render
from weenv.cli.reach import Reach, reaching
from weenv.core.errors import ConfigError
from weenv.core.regular import given

if TYPE_CHECKING:
    from weenv.registry.groupref.policy import Accepted

PASSWORD = "WEENV_KEY_PASSWORD"  # noqa: S105 - the name of the variable
_MAX_PASSWORD = 4096

_password = click.option(
    "--password-file", default="", metavar="FILE", help=f"Holds the private key's password.  [default: ${PASSWORD}]"
)
_json = click.option("--json", "as_json", is_flag=True, help="For machines.")


def _read_password(path: str) -> bytes:
    """The password: a file's first line, or the environment's. Never from the command line, which others can see."""
    if not path:
        return os.environb.get(PASSWORD.encode(), b"")
    try:
        with open(path, "rb", opener=given) as file:
            data = file.read(_MAX_PASSWORD + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    line = data.split(b"\n", 1)[0].rstrip(b"\r")
    if not line or len(data) > _MAX_PASSWORD:
        raise ConfigError(f"{path} holds no usable password")
    return line


@click.command()
@click.argument("prefix")
@click.option(
    "--algorithm", type=click.Choice(["ecdsa-p256", "ed25519"]), default="ecdsa-p256", show_default=True, help="Of the key."
)
@_password
@_json
def keygen(prefix: str, algorithm: str, password_file: str, as_json: bool) -> None:
    """Make a key pair: PREFIX.key (PKCS #8, encrypted where there is a password) and PREFIX.pub.

    \b
    Examples:
      weenv group keygen team
      WEENV_KEY_PASSWORD=... weenv group keygen --algorithm ed25519 /etc/weenv/keys/team
    """
    from weenv.registry.groupref import keys

    key = keys.generate(algorithm)
    private, public = keys.write_key_pair(prefix, key, _read_password(password_file))
    fingerprint = keys.load_public(keys.public_pem(key)).fingerprint
    if as_json:
        render.print_json({"private": private, "public": public, "fingerprint": fingerprint})
    else:
        click.echo(f"{private}\n{public}\nfingerprint {fingerprint}")


@click.command()
@click.argument("reference", metavar="REF")
@click.option("--key", "key_path", required=True, metavar="FILE", help="The private key.")
@_password
@click.option("--identity", default="", metavar="HOST/NAME", help="The repository that it is signed for.  [default: REF's]")
@click.option("--annotation", multiple=True, metavar="NAME=VALUE", help="Something else to sign along.")
@click.option("--storage", type=click.Choice(["auto", "referrers", "tag"]), default="auto", show_default=True,
              help="Beside REF by the referrers API, or under a tag as cosign 1 and 2 look for it.")  # fmt: skip
@reaching
@_json
def sign(
    reference: str,
    key_path: str,
    password_file: str,
    identity: str,
    annotation: tuple[str, ...],
    storage: str,
    as_json: bool,
    reach: Reach,
) -> None:
    """Sign what REF means now.

    `cosign verify --key FILE.pub --insecure-ignore-tlog=true REF` accepts it, too; with --experimental-oci11 where it is
    stored by the referrers API.

    \b
    Example:
      weenv group sign --key team.key registry.example/harness/claude:1.0
    """
    from weenv.registry.client import RegistryClient
    from weenv.registry.groupref import keys
    from weenv.registry.groupref import sign as signing
    from weenv.registry.reference import parse_location

    pairs = dict(value.partition("=")[::2] for value in annotation)
    key = keys.load_private(keys.read_key_file(key_path, given), _read_password(password_file), name=key_path)

    async def work() -> signing.Signed:
        async with RegistryClient(reach.registry()) as client:
            return await signing.sign(
                client, parse_location(reference), key, identity=identity, storage=storage, optional=pairs
            )

    done = asyncio.run(work())
    if as_json:
        render.print_json(
            {
                "reference": reference,
                "digest": done.digest,
                "identity": done.identity,
                "fingerprint": done.fingerprint,
                "stored": done.stored,
            }
        )
    else:
        click.echo(f"signed {done.digest} for {done.identity} with {done.fingerprint[:16]} ({done.stored})")


@click.command()
@click.argument("reference", metavar="REF")
@click.option("--key", "key_paths", multiple=True, metavar="FILE", help="A public key; any of them.  [default: the policy's]")
@click.option("--identity", multiple=True, metavar="PATTERN",
              help="Names that it may be signed for; **: any or none.  [default: REF's own]")  # fmt: skip
@click.option("--policy", "policy_path", default="", metavar="FILE", help="A policy instead of the node's.")
@reaching
@_json
def verify(
    reference: str,
    key_paths: tuple[str, ...],
    identity: tuple[str, ...],
    policy_path: str,
    as_json: bool,
    reach: Reach,
) -> None:
    """Check REF's signature: by the keys given, else as this node's policy would.

    Signatures of `weenv group sign` and of `cosign sign --key` count, for the repository that they name. What cosign 3 signs
    names none, unless told to (-a docker-reference=HOST/NAME): that counts with --identity '**', for whatever name.

    \b
    Examples:
      weenv group verify --key team.pub registry.example/harness/claude:1.0
      weenv group verify --key cosign.pub --identity '**' registry.example/harness/claude:1.0
      weenv group verify registry.example/harness/claude:1.0
    """
    from weenv.registry.client import RegistryClient
    from weenv.registry.groupref import keys
    from weenv.registry.groupref import policy as policies
    from weenv.registry.groupref import sign as signing
    from weenv.registry.groupref.resolve import Resolver
    from weenv.registry.reference import parse_location

    location = parse_location(reference)
    known = [keys.load_public(keys.read_key_file(path, given), name=path) for path in key_paths]
    policy = policies.load_policy(policy_path, given) if policy_path else None
    if not known and policy is None:
        policy = policies.policy_from_tables(reach.tables())
        if policy is None:
            raise ConfigError("this node has no policy", hint="name a key: --key FILE, or a policy: --policy FILE")

    async def work() -> Accepted | None:
        async with RegistryClient(reach.registry()) as client:
            if known:
                return await signing.verify(client, location, known, identity=identity)
            await Resolver(client, policy=policy).resolve(reference)
            return None

    accepted = asyncio.run(work())
    if as_json:
        value: dict[str, object] = {"reference": reference, "accepted": True}
        if accepted is not None:
            value |= {
                "digest": accepted.payload.digest,
                "identity": accepted.payload.reference,
                "key": accepted.key.name,
                "fingerprint": accepted.key.fingerprint,
                "optional": dict(accepted.payload.optional),
            }
        render.print_json(value)
    elif accepted is not None:
        name = accepted.payload.reference or "no repository"
        click.echo(f"{accepted.payload.digest} is signed for {name} with {accepted.key.name}")
    else:
        click.echo(f"{reference}: accepted by the policy")
