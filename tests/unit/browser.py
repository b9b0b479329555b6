"""A headless Chromium that is driven over its debugging pipe: what a page logs, loads and looks like."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """One page. `console`: errors and warnings it logged and exceptions it threw; `requested`: addresses it asked for."""

    def __init__(self, timeout: float = 120) -> None:
        self.console: list[str] = []
        self.requested: list[str] = []
        self._timeout = timeout
        self._number = 0
        self._pending = b""
        self._session: str | None = None

    def __enter__(self) -> "Browser":
        assert CHROMIUM
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'  # Chromium reads commands at 3 and answers at 4
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "bash",
                str(command_read),
                str(answer_write),
                CHROMIUM,
                *_FLAGS,
                f"--user-data-dir={self._profile.name}",
            ],
            pass_fds=(command_read, answer_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it has settled."""
        self.look(width, height, dark)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Change window and colour scheme of the page that is open."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        until = time.monotonic() + self._timeout
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"not in time: {expression}"
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        """The whole page, however long."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + self._timeout
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, "Chromium ended"
            self._pending += part
        line, self._pending = self._pending.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
