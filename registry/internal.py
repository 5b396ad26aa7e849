"""Hosts that somebody else must not make this node contact: the node itself and its link.

Whoever publishes an image writes its annotations, one of which names a registry; a registry redirects, and names the server
that gives out tokens, whose answer it is then sent. A node that goes wherever it is sent can be
made to ask services that trust it because of where it is: those on loopback, and a cloud's metadata service, which
hands out credentials. Private networks are not among them: that is where registries of an organisation are.

A name is judged by the addresses it has now. It may have others when the connection is made, so this is no substitute for
a metadata service that demands a token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from weenv.core.errors import SourceError
from weenv.registry.config import RegistryConfig, is_loopback, split_host

METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "fd00:ec2::254",  # AWS over IPv6 (IPv4: link-local, as Google's, Azure's and most others')
        "fd20:ce::254",  # Google over IPv6
        "168.63.129.16",  # Azure's wire server
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle, older machines
    )
)
"""Metadata services at addresses that no class of addresses tells, as their operators document them."""


def is_internal_address(text: str) -> bool:
    """True for loopback, link-local, unspecified, multicast and metadata addresses, also as IPv6 forms of IPv4 ones."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in network for network in _AROUND_IPV4):
            return is_internal_address(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return is_internal_address(str(inner))
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or address in METADATA
        or (address.version == 4 and address in _THIS_NETWORK)
    )


_AROUND_IPV4 = tuple(ipaddress.ip_network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96"))
"""IPv6 addresses that end in an IPv4 one: RFC 6052, RFC 8215 (as far as it is used with /96), RFC 4291 section 2.5.5.1.

``::`` and ``::1`` are among the last; as 0.0.0.0 and 0.0.0.1 they are internal, too.
"""
_THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")


async def is_internal(host: str) -> bool:
    """Whether a registry host (``name`` or ``name:port``) is, or now resolves to, an address that is internal.

    False for a name that does not resolve: whoever connects will be told.
    """
    name, port = split_host(host)
    if not name or is_loopback(name):
        return True
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(is_internal_address(str(address[0])) for *_, address in found)


def leads_inside(source: str, target: str, config: RegistryConfig) -> bool:
    """Whether a redirect from URL ``source`` to URL ``target`` leads to this node, its link or a metadata service.

    So does a token's realm. A name is judged as it stands there and by the addresses that it has now, so this waits for the
    resolver. A registry on loopback may lead elsewhere on loopback, and any to what is configured.
    """
    there = urlsplit(target)
    here, name = (_plainly(part.hostname or "") for part in (urlsplit(source), there))
    if name == here or config.is_configured(there.netloc.rpartition("@")[2]):
        return False
    inside = [address for address in _addresses(name) if is_internal_address(address)]
    if not inside:
        return False
    return not all(map(is_loopback, [*inside, *(_addresses(here) or ["unknown"])]))


def refuse_inside(source: str, target: str, config: RegistryConfig, what: str) -> None:
    """Raise SourceError, which begins with ``what``, where :func:`leads_inside` holds. Blocking."""
    if leads_inside(source, target, config):
        raise SourceError(
            f"{what}, which is this node or its link", hint="list that host in [registry] allow_sources if this is meant"
        )


def _addresses(name: str) -> list[str]:
    """What a name resolves to; nothing where it does not, for whoever connects will be told."""
    if is_loopback(name):
        return ["127.0.0.1"]
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _plainly(name: str) -> str:
    """A host's name; an address in whatever notation resolvers take it (``127.1``, ``2130706433``) as it is usually written."""
    name = name.rstrip(".")
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4][0])
    except (OSError, UnicodeError, ValueError):
        return name
