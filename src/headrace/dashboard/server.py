"""The live page: a small web application over run directories, which it only reads."""

import asyncio
import hmac
import math
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.dashboard.palette import about
from headrace.dashboard.runs import Cursor, Run
from headrace.dashboard.samples import Query
from headrace.errors import ConfigError

STATIC = Path(__file__).parent / "static"
_COOKIE = "headrace_token"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_OWN_SITES = ("same-origin", "none")
_POLL_S = 1.0
_ALIVE_S = 15.0
_MOST_SAMPLES = 200
_MOST_CONNECTIONS = 200
"""Each listener costs a look at its runs every second; beyond these, requests get status 503."""
_HEADERS = {
    # Samples are texts of a model and of data from anywhere: nothing but the page's own code ever runs.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PORT = re.compile(r":[0-9]{1,5}$")
# What an address and a cookie take as it is.
_TOKEN = re.compile(r"[A-Za-z0-9._~-]+")


def make_app(runs: Sequence[Run], *, token: str | None = None, hosts: Sequence[str] = _LOOPBACK) -> Starlette:
    """Return the application; with `token`, who asks has to bring it: once, as `?token=`, then by a cookie.

    Without a token it answers only under a name in `hosts`, so that a page from elsewhere, whose name is made to
    resolve to this machine, reads nothing. Other pages of the browser may link to this one, and ask for nothing else.

    Raises:
        ConfigError: a token that lets everybody in, or that no address can carry as it is.
    """
    if token is not None and not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"--token {token!r}: expected letters of ASCII, digits and . _ ~ -, and at least one; give another, or "
            "leave it out"
        )
    board = _Board(runs)
    routes = [
        Route("/api/about", board.about),
        Route("/api/runs/{number}", board.run),
        Route("/api/runs/{number}/samples", board.samples),
        Route("/api/events", board.events),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    middleware = [
        Middleware(_Guard, token=token, hosts=hosts),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
    ]
    app = Starlette(routes=routes, middleware=middleware)
    app.state.board = board
    return app


class _Guard:
    """Lets nobody in who has no token, or who comes under another name than this machine's."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str]) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        response = self._refusal(request) or self._welcome(request)
        await (response or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if _is_of_another_page(request):
            return PlainTextResponse("another page asks for this; open the page itself\n", 403)
        if self._token is None:
            name = _PORT.sub("", request.headers.get("host", ""))
            text = "this page answers under the names of its own machine; with headrace dashboard --token, under any\n"
            return None if name in self._hosts else PlainTextResponse(text, 403)
        given = request.query_params.get("token") or request.cookies.get(_cookie_of(request)) or ""
        if hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        text = "a token is needed: open the address that headrace dashboard has printed\n"
        return PlainTextResponse(text, 401)

    def _welcome(self, request: Request) -> Response | None:
        """Put a token that came with the address into a cookie, so that it stands in no history."""
        if self._token is None or "token" not in request.query_params:
            return None
        others = urlencode(
            [(name, text) for name, text in request.query_params.multi_items() if name != "token"]
        )
        # A path that begins with two slashes would be the address of another host.
        address = f"/{request.url.path.lstrip('/')}" + (f"?{others}" if others else "")
        response = RedirectResponse(address, status_code=303)
        response.set_cookie(_cookie_of(request), self._token, httponly=True, samesite="strict")
        return response


def _cookie_of(request: Request) -> str:
    """Return a name with the port that the browser sees: cookies are shared by all ports of a host."""
    port = _PORT.search(request.headers.get("host", ""))
    return f"{_COOKIE}_{port[0][1:]}" if port else _COOKIE


def _is_of_another_page(request: Request) -> bool:
    """Whether a browser says that a page of another address asks, and for more than to open this one."""
    origin = request.headers.get("origin")
    is_own = origin is None or origin.partition("://")[2] == request.headers.get("host")
    if is_own and request.headers.get("sec-fetch-site", "none") in _OWN_SITES:
        return False
    # A frame that another page draws is a navigation as well: it gets the page's files, which show nothing there.
    return request.headers.get("sec-fetch-mode") != "navigate" or request.scope["path"].startswith("/api/")


class _Board:
    """What the routes answer, from the runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self.is_closing: Callable[[], bool] = lambda: False

    async def about(self, request: Request) -> Response:
        return _json(about([run.name for run in self._runs]))

    async def run(self, request: Request) -> Response:
        run = self._find(request)

        def read() -> bytes:
            run.poll()
            return msgspec.json.encode(run.payload())

        return Response(await run_in_threadpool(read), media_type="application/json")

    async def samples(self, request: Request) -> Response:
        run = self._find(request)
        query = read_query(request.query_params)

        def find() -> dict[str, Any]:
            run.poll()
            return run.find(query)

        return _json(await run_in_threadpool(find))

    async def events(self, request: Request) -> Response:
        try:
            cursors = msgspec.json.decode(request.query_params.get("cursors", "{}"), type=dict[int, Cursor])
        except msgspec.DecodeError as error:
            raise HTTPException(400, f"cursors: {error}") from error
        stream = self._stream({n: c for n, c in cursors.items() if 0 <= n < len(self._runs)})
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(self, cursors: dict[int, Cursor]) -> AsyncIterator[str]:
        """Tell what is new of some runs, each second, for as long as somebody listens."""
        silent_s = 0.0
        yield "retry: 2000\n\n"
        while not self.is_closing():
            news = await run_in_threadpool(self._news, cursors)
            for number, change in news.items():
                cursors[number] = change["cursor"]
                yield f"data: {msgspec.json.encode({'run': number, **change}).decode()}\n\n"
            silent_s = 0.0 if news else silent_s + _POLL_S
            if silent_s >= _ALIVE_S:  # so that a listener who has gone is noticed
                silent_s = 0.0
                yield ": alive\n\n"
            await asyncio.sleep(_POLL_S)

    def _news(self, cursors: Mapping[int, Cursor]) -> dict[int, dict[str, Any]]:
        for number in cursors:
            self._runs[number].poll()
        found = {number: self._runs[number].news(cursor) for number, cursor in cursors.items()}
        return {number: change for number, change in found.items() if change is not None}

    def _find(self, request: Request) -> Run:
        number: str = request.path_params["number"]
        found = dict(zip(map(str, range(len(self._runs))), self._runs)).get(number)
        if found is None:
            raise HTTPException(404, f"there is no run {number[:20]}")
        return found


def read_query(values: Mapping[str, str]) -> Query:
    """Return the query that a request's parameters spell; 400 for one that is not of its type."""
    try:
        query = msgspec.convert(dict(values), Query, strict=False)
    except msgspec.ValidationError as error:
        raise HTTPException(400, str(error)) from error
    if math.isnan(query.min_reward) or math.isnan(query.max_reward) or query.offset < 0 or query.limit < 0:
        raise HTTPException(400, "offset and limit are at least 0, rewards are numbers")
    return replace(query, limit=min(query.limit, _MOST_SAMPLES))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class _Server(uvicorn.Server):
    """Says when it answers."""

    started_at: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_at()


def serve(app: Starlette, host: str, port: int, started: Callable[[int], None]) -> None:
    """Serve until Ctrl-C; `started` gets the port, which for port 0 is a free one.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        server = _Server(
            uvicorn.Config(
                app,
                log_level="warning",
                lifespan="off",
                timeout_graceful_shutdown=2,
                limit_concurrency=_MOST_CONNECTIONS,
            )
        )
        app.state.board.is_closing = lambda: server.should_exit
        server.started_at = lambda: started(listening.getsockname()[1])
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
