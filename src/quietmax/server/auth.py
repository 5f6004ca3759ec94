"""Who asks: keys in the Authorization header, sessions of the dashboard, anonymous access on loopback.

Keys are read from the ledger and kept for a second, so that a revoked key stops working within that time; a charge
checks its key once more in its own transaction. A session is a signed statement of a key's id and an end; the key
itself is in no cookie.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from dataclasses import dataclass

from quietmax.errors import QuietmaxError
from quietmax.ledger.api_keys import ApiKey, find_key
from quietmax.ledger.ledger import Ledger
from quietmax.server.errors import HttpError, unavailable
from quietmax.server.settings import ANONYMOUS, Settings, is_loopback

SESSION_SECONDS = 8 * 3600
_FRESH_SECONDS = 1.0
_FORWARDED = (b"x-forwarded-for", b"forwarded", b"x-real-ip", b"x-forwarded-host")
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `key` is None for anonymous access."""

    client: str
    client_id: int
    key: str | None
    admin: bool


class Access:
    """Recognises callers."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._known: dict[str, ApiKey] = {}
        self._read_at = -_FRESH_SECONDS
        self._reading: asyncio.Task[None] | None = None
        self._anonymous = (
            Caller(ANONYMOUS, ledger.client(ANONYMOUS), None, admin=False) if settings.anonymous else None
        )

    async def caller(self, headers: Headers, *, as_last_known: bool = False) -> Caller:
        """The caller of a request, or a refusal with 401, 403 or 503.

        `as_last_known`: while the ledger is away, the keys read last will do.
        """
        if time.monotonic() - self._read_at > _FRESH_SECONDS:
            try:
                await self._refresh()
            except HttpError:
                if not as_last_known:
                    raise
        presented = None
        for name, value in headers:
            if name == b"authorization":
                presented = value
        if presented is None:
            return self._without_key(headers)
        scheme, _, token = presented.decode("latin-1").partition(" ")
        key = (
            find_key(self._known, token.strip(), time.time_ns() // 1000)
            if scheme.lower() == "bearer"
            else None
        )
        if key is None:
            raise _unknown("The key is wrong, revoked or expired; ask the administrator for a new one.")
        return _caller(key)

    def _without_key(self, headers: Headers) -> Caller:
        if self._anonymous is None:
            raise _unknown("A key is needed; send it as 'Authorization: Bearer qm_...'.")
        if from_another_site(headers):
            raise HttpError(403, "Anonymous access is not for pages of other sites; send a key.")
        for name, value in headers:
            if name in _FORWARDED:
                raise HttpError(
                    403, "Anonymous access is for this machine only, not through a proxy; send a key."
                )
            if name == b"host" and not is_loopback(_host(value.decode("latin-1"))):
                raise HttpError(
                    403, "Anonymous access is for this machine only, under its own name; send a key."
                )
        return self._anonymous

    async def login(self, presented: str) -> tuple[str, Caller]:
        """A session for a key: the cookie's value and who it is."""
        await self._refresh()
        key = find_key(self._known, presented.strip(), time.time_ns() // 1000)
        if key is None:
            raise _unknown("The key is wrong, revoked or expired; ask the administrator for a new one.")
        content = f"{key.id}.{int(time.time()) + SESSION_SECONDS}"
        return f"{content}.{self._signature(content)}", _caller(key)

    async def session(self, cookie: str | None, headers: Headers) -> Caller | None:
        """The caller of a page: by its session, else anonymous where that is allowed, else None."""
        if time.monotonic() - self._read_at > _FRESH_SECONDS:
            await self._refresh()
        content, _, signature = (cookie or "").rpartition(".")
        number, _, end = content.partition(".")
        if (
            hmac.compare_digest(signature.encode(), self._signature(content).encode())
            and int(end) > time.time()
        ):
            key = self._known.get(number)
            if key is not None and key.is_valid(time.time_ns() // 1000):
                return _caller(key)
        return None if self._anonymous is None else self._without_key(headers)

    async def _refresh(self) -> None:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
            self._reading.add_done_callback(self._finished)
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), self._settings.seconds)
        except (QuietmaxError, TimeoutError) as problem:
            raise unavailable(str(problem) or "The ledger does not answer; ask again later.") from problem

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        if not task.cancelled():
            task.exception()

    async def _read(self) -> None:
        started = time.monotonic()
        found = await asyncio.to_thread(self._ledger.keys)
        self._known = {key.id: key for key in found}
        self._read_at = started

    def _signature(self, content: str) -> str:
        return hmac.new(self._ledger.session_secret, content.encode(), hashlib.sha256).hexdigest()


def from_another_site(headers: Headers) -> bool:
    """Whether a form or script of another site has sent a request: browsers say where it comes from."""
    told = dict(headers)
    origin, site = told.get(b"origin"), told.get(b"sec-fetch-site")
    return (site is not None and site not in (b"same-origin", b"none")) or (
        origin is not None and origin.partition(b"://")[2] != told.get(b"host")
    )


def _caller(key: ApiKey) -> Caller:
    return Caller(key.client, key.client_id, key.id, admin=key.role == "admin")


def _host(value: str) -> str:
    """The Host header without its port.

    >>> _host("[::1]:8080"), _host("localhost:8080")
    ('[::1]', 'localhost')
    """
    return (
        value[: value.index("]") + 1] if value.startswith("[") and "]" in value else value.partition(":")[0]
    )


def _unknown(sentence: str) -> HttpError:
    return HttpError(401, sentence, headers={"www-authenticate": "Bearer"})
