"""Who may read what `simic watch` serves: a middleware in front of every answer.

A page of another site can make this browser send requests here, and other users of the machine can reach the port. So a
request must use a name of this server (against DNS rebinding), come from its own pages or the address bar (against
cross-site requests), only read, and know the token, which the first answer replaces by a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Headers = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
OWN_FETCHES = ("", "none", "same-origin")
"""Values of Sec-Fetch-Site of our own pages, of the address bar, and of programs that are no browser."""
MAX_HEAD_BYTES = 16 * 2**10
"""Of the head of a request; the HTTP parser refuses longer ones only if they come in pieces."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Refusal(NamedTuple):
    """An answer instead of the one that was asked for."""

    status: int
    sentence: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Access:
    """What a request must know and be addressed to."""

    token: str | None
    """None: everybody who reaches the port may read."""
    names: frozenset[str] = LOOPBACK_NAMES
    """Names and addresses, in lower case, under which this server answers."""
    any_address: bool = False
    """Whether it also answers under every IP address: an address, unlike a name, cannot be rebound."""
    cookie: str = "simic_watch"
    """Name of the cookie: browsers share cookies between all ports of a machine, so each server needs its own."""
    keys: set[str] = field(default_factory=set, repr=False)
    """Tokens for one use: other users can see the address that a browser is started with in the list of processes."""
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """Value of the cookie: not the token, so that a cookie that leaks opens nothing after a restart."""

    def knows_token(self, given: str) -> bool:
        """Whether the text is the token or a key, which is used up; wrong ones take as long as right ones."""
        for key in self.keys:
            if hmac.compare_digest(given.encode(), key.encode()):
                self.keys.discard(key)
                return True
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def has_session(self, cookies: bytes) -> bool:
        """Whether a Cookie header holds ours; other servers on this machine add theirs."""
        pairs = [pair.strip().partition(b"=") for pair in cookies.split(b";")]
        own = [value for name, _, value in pairs if name == self.cookie.encode()]
        return any(hmac.compare_digest(value, self.session.encode()) for value in own)

    def answers_to(self, host: str) -> bool:
        """Whether a Host header names this server. Any port is accepted, as tunnels change it."""
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        name = name.lower().removeprefix("[").removesuffix("]")
        if port and not (port.isascii() and port.isdigit()):
            return False
        return name in self.names or (self.any_address and _is_address(name))


def names_of(host: str) -> tuple[frozenset[str], bool]:
    """The names under which a server that listens on `host` answers, and whether every IP address is one of them."""
    if not _is_address(host):
        return LOOPBACK_NAMES | {host.lower()}, False
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return LOOPBACK_NAMES | {socket.gethostname().lower(), socket.getfqdn().lower()}, True
    return LOOPBACK_NAMES | {host.lower()}, False


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class SecurityMiddleware:
    """Refuses requests that may not read, and adds the security headers to every answer."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no web sockets here

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = list(_secured(message.get("headers", [])))
            await send(message)

        if refusal := self._refusal(scope):
            await send_refusal(scope, send_secured, refusal)
        else:
            await self._app(scope, receive, send_secured)

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Why a request is not answered; None if it is. Cheap checks come first, the token last."""
        headers = list(scope["headers"])
        hosts, host = _values(headers, b"host"), _text(headers, b"host")
        if len(hosts) != 1 or not self._access.answers_to(host):
            return Refusal(403, "this server does not answer under that name; use the address that simic watch printed")
        if scope["method"] not in ("GET", "HEAD"):
            return Refusal(405, "this server only reads: use GET or HEAD", ((b"allow", b"GET, HEAD"),))
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            return Refusal(431, f"the head of a request here has at most {MAX_HEAD_BYTES:,} bytes")
        if _has_body(headers):
            return Refusal(400, "a request here has no body", ((b"connection", b"close"),))
        origins = _values(headers, b"origin")
        if any(origin.lower() != f"{scope['scheme']}://{host}".lower().encode() for origin in origins):
            return Refusal(403, "requests from pages of other sites are refused")
        if _text(headers, b"sec-fetch-site").lower() not in OWN_FETCHES:
            return Refusal(403, "requests from other sites are refused; copy the address into the address bar instead")
        if not scope["path"].startswith("/") or scope["path"].startswith("//"):
            return Refusal(404, "there is nothing at this address")  # as a redirect, //name would lead to that server
        return None if self._access.token is None else self._token_refusal(scope, headers)

    def _token_refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        """Ask for the token. Whoever gives it gets the cookie and is sent to the same address without it."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and all(self._access.knows_token(value) for value in given):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            location = quote(scope["path"]) + (f"?{rest}" if rest else "")
            cookie = f"{self._access.cookie}={self._access.session}; Path=/; HttpOnly; SameSite=Strict"
            return Refusal(303, "", ((b"location", location.encode()), (b"set-cookie", cookie.encode())))
        if given:
            return Refusal(403, "that is not the token of this server; use the address that simic watch printed")
        if self._access.has_session(b";".join(_values(headers, b"cookie"))):
            return None
        return Refusal(401, "this needs the token; open the address that simic watch printed")


async def send_refusal(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Answer with a sentence: as JSON to the page's script, as plain text, which no browser runs, to a reader."""
    if scope["path"].startswith("/api/"):
        body, kind = json.dumps({"error": refusal.sentence}).encode(), b"application/json"
    else:
        body, kind = f"simic watch: {refusal.sentence}\n".encode(), b"text/plain; charset=utf-8"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *refusal.headers]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _secured(headers: Headers) -> Iterator[tuple[bytes, bytes]]:
    yield from headers
    yield from SECURITY_HEADERS
    if not _values(headers, b"cache-control"):
        yield b"cache-control", b"no-store"


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for own, value in headers if own == name]


def _text(headers: Headers, name: bytes) -> str:
    return b", ".join(_values(headers, name)).decode("latin-1")


def _head_bytes(scope: Scope) -> int:
    return (
        len(scope["path"]) + len(scope["query_string"]) + sum(len(name) + len(text) for name, text in scope["headers"])
    )


def _has_body(headers: Headers) -> bool:
    return bool(_values(headers, b"transfer-encoding")) or any(
        value.strip() != b"0" for value in _values(headers, b"content-length")
    )
