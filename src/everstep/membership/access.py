"""Who may connect: where the coordinator listens, and the token it needs beyond loopback."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from everstep.core.errors import ConfigError
from everstep.membership.codec import SUBPROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Where to listen. Beyond loopback a token is a must: whoever reaches the port could join."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 for any free one."""

    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise ConfigError(
                "host", self.host, "is reachable from other machines, so a token must be given"
            )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    why: str


def check_token(request: HTTPConnection, *, token: str) -> Refusal | None:
    """The token may come as a bearer header or, for browsers and curl, as `?token=`."""
    if not token:
        return None
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.query_params.get("token", "")
    if not given:
        return Refusal(401, "this coordinator wants a token and none was given")
    # Compared in constant time, so that answers do not tell how much of a guess was right.
    if not hmac.compare_digest(given.encode(), token.encode()):
        return Refusal(401, "the token is not this coordinator's")
    return None


def check_peer(request: HTTPConnection, *, token: str) -> Refusal | None:
    """For WebSockets of workers and agents: the token, the version, and no web pages."""
    if "origin" in request.headers:
        return Refusal(403, "web pages may not join a job")
    offered = request.scope.get("subprotocols", [])
    if SUBPROTOCOL not in offered:
        theirs = ", ".join(offered) or "none"
        return Refusal(
            426,
            f"it speaks {SUBPROTOCOL} and was offered {theirs}:"
            " install the same everstep on all machines",
        )
    return check_token(request, token=token)
