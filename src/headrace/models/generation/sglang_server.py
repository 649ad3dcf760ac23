"""An SGLang server over HTTP: one that runs already, or one that is started here and ended with `close`.

Each call has a time limit. A connection that is refused or breaks is tried once more: every call that headrace makes
may be repeated.

Source: SGLang's documentation of its native API, of sampling parameters, and "SGLang for RL systems" (docs/engines.md
names the versions).
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.config import SGLangConfig
from headrace.errors import ConfigError, GenerationError

_RECONNECT_S = 0.5
_POLL_S = 0.2
_HEALTH_S = 20.0
_END_S = 10.0
_PORTS = 3
_MOST_TEXT = 300
_BROKEN = (OSError, http.client.HTTPException)


class SGLangServer:
    """The address of a server, and its process if it is our own."""

    def __init__(self, cfg: SGLangConfig) -> None:
        self._cfg = cfg
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self.url = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def attach(self, url: str) -> None:
        """Use the server at `url`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"generation.sglang.url={url!r}: expected an address such as http://10.0.0.2:30000"
            )
        self.url = url.rstrip("/")
        try:
            self._wait()
        except GenerationError as error:
            raise ConfigError(str(error)) from error

    def start(self, arguments: Mapping[str, Any], folder: Path) -> None:
        """Start a server on a free port of this host; its output goes to a file in `folder`."""
        python = self._cfg.python or sys.executable
        for left in reversed(range(_PORTS)):
            self._launch(python, arguments, folder)
            try:
                return self._wait()
            except GenerationError as error:
                self.close()
                # Somebody else may take a port while the server imports what it needs.
                if left and "address already in use" in str(error).lower():
                    continue
                raise ConfigError(
                    f"generation.backend=sglang: {error}; it was started with {python} -m sglang.launch_server: see "
                    "generation.sglang.python and generation.sglang.args, or name one that runs "
                    "(generation.sglang.url)"
                ) from error

    def _launch(self, python: str, arguments: Mapping[str, Any], folder: Path) -> None:
        port = _free_port()
        self.url, self._log = f"http://127.0.0.1:{port}", folder / "server.log"
        own = {**self._cfg.args, **arguments, "host": "127.0.0.1", "port": port}
        command = [python, "-m", "sglang.launch_server", *command_line(own)]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # Ctrl-C is for this process alone
                )
        except OSError as error:
            raise ConfigError(
                f"generation.sglang.python={python}: {error.strerror}; name an interpreter"
            ) from error

    def get(self, path: str) -> Any:
        return self._parsed("GET", path, self._call("GET", path, None))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of the answer.

        Raises:
            GenerationError: no answer in time or at all, an error of the server, or an answer that is no JSON.
        """
        return self._parsed("POST", path, self._call("POST", path, json.dumps(body).encode()))

    def tell(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Do the same with a call whose answer does not matter."""
        self._call("POST", path, json.dumps(body or {}).encode())

    def close(self) -> None:
        """End the process with its children, if it is our own; may be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        # Children may outlive their parent.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _wait(self) -> None:
        """Wait until the server says that it is well; one that runs elsewhere has to answer at once."""
        deadline = time.monotonic() + self._cfg.startup_timeout_s
        while True:
            try:
                status, _ = self._exchange(
                    "GET", "/health", None, min(_HEALTH_S, self._cfg.startup_timeout_s)
                )
                if status == 200:
                    return
                seen = f"status {status}"
            except _BROKEN as error:
                seen = _reason(error)
                if self._process is None:
                    raise self._unreachable("GET", "/health", error) from error
            if self._process is not None and self._process.poll() is not None:
                raise self._ended()
            if time.monotonic() > deadline:
                raise GenerationError(
                    f"SGLang at {self.url} is not ready ({seen}) after generation.sglang.startup_timeout_s="
                    f"{self._cfg.startup_timeout_s:g}; raise it"
                )
            time.sleep(_POLL_S)

    def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        limit = self._cfg.timeout_s
        try:
            try:
                status, answer = self._exchange(method, path, body, limit)
            except TimeoutError:
                raise
            except _BROKEN:
                time.sleep(_RECONNECT_S)
                status, answer = self._exchange(method, path, body, limit)
        except TimeoutError as error:
            raise GenerationError(
                f"SGLang at {self.url} gave no answer to {method} {path} within generation.sglang.timeout_s="
                f"{limit:g}; raise it, or ask for less at once (grpo.num_prompts_per_step, generation.max_new_tokens)"
            ) from error
        except _BROKEN as error:
            raise self._unreachable(method, path, error) from error
        if status != 200:
            raise GenerationError(f"SGLang refused {method} {path} with status {status}: {_message(answer)}")
        return answer

    def _exchange(self, method: str, path: str, body: bytes | None, limit: float) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=limit)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, parts.path + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _parsed(self, method: str, path: str, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except ValueError as error:
            raise GenerationError(
                f"SGLang at {self.url} answered {method} {path} with something other than JSON "
                f"({_shown(answer)!r}); is generation.sglang.url the address of an SGLang server?"
            ) from error

    def _unreachable(self, method: str, path: str, error: Exception) -> GenerationError:
        if self._process is not None:
            # A process that dies closes its connections before it can be waited for.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            if self._process.poll() is not None:
                return self._ended()
        return GenerationError(
            f"SGLang at {self.url} does not answer {method} {path} ({_reason(error)}); start the server, or mend "
            "generation.sglang.url"
        )

    def _ended(self) -> GenerationError:
        assert self._process is not None
        assert self._log is not None
        code = self._process.returncode
        lines = self._log.read_text("utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return GenerationError(
            f"the SGLang server has ended with exit code {code}, and said last: {last[:_MOST_TEXT]}"
        )


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as the server takes them; flags are there or not, mappings become JSON.

    >>> command_line({"tp_size": 2, "disable_radix_cache": True, "enable_metrics": False})
    ['--tp-size', '2', '--disable-radix-cache']
    """
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            words.append(json.dumps(dict(value)))
        elif isinstance(value, list | tuple):
            words += [str(entry) for entry in value]
        elif value is not True:
            words.append(str(value))
    return words


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _message(answer: bytes) -> str:
    """Return what an error's body says, wherever the server puts it."""
    try:
        said = json.loads(answer)
    except ValueError:
        return _shown(answer)
    for key in ("error", "detail", "message"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return " ".join(str(said).split())[:_MOST_TEXT]


def _shown(answer: bytes) -> str:
    return " ".join(answer.decode(errors="replace").split())[:_MOST_TEXT] or "no text"


def _reason(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
