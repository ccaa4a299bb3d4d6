"""A real Chromium for tests, spoken to through two pipes in the DevTools protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe"),
)
PATIENCE_SECONDS = 30.0
# Of Input.dispatchKeyEvent: the code of a key and its number on Windows.
KEYS = {
    " ": ("Space", 32),
    "Escape": ("Escape", 27),
    "Home": ("Home", 36),
    "End": ("End", 35),
    "ArrowLeft": ("ArrowLeft", 37),
    "ArrowRight": ("ArrowRight", 39),
    "+": ("NumpadAdd", 107),
    "-": ("NumpadSubtract", 109),
    "?": ("Slash", 191),
    **{str(digit): (f"Digit{digit}", 48 + digit) for digit in range(10)},
}


class Navigated(Exception):
    """The page that was asked is gone, for another one has come."""


class Browser:
    """One Chromium with one page; `problems` is what its console and its security policy say."""

    def __init__(self, width: int = 1440, height: int = 900) -> None:
        assert CHROMIUM is not None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}"]
        # Chromium reads from descriptor 3 and writes to 4.
        wrapped = [
            *("bash", "-c", 'exec "$@" 3<&"$IN" 4>&"$OUT"', "bash"),
            *command,
            "about:blank",
        ]
        self.process = subprocess.Popen(
            wrapped,
            pass_fds=(theirs_in, theirs_out),
            env={
                **os.environ,
                "HOME": self._profile,  # or it leaves things in the user's
                "IN": str(theirs_in),
                "OUT": str(theirs_out),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._read = b""
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = ""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of one command."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            told = self._receive(end - time.monotonic(), method)
            if told.get("id") == number:
                if "navigated" in told.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in told, (method, told["error"])
                result: dict[str, Any] = told["result"]
                return result

    def _receive(self, seconds: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, seconds))
            assert ready, f"the browser does not answer: {what}"
            part = os.read(self._in, 1 << 20)
            assert part, f"the browser has ended: {what}"
            self._read += part
        packet, _, self._read = self._read.partition(b"\0")
        told: dict[str, Any] = json.loads(packet)
        self._note(told.get("method", ""), told.get("params", {}))
        return told

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Log.entryAdded" and told["entry"]["level"] in ("warning", "error"):
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("warning", "error"):
            self.problems.append(str([one.get("value") for one in told["args"]]))
        elif event == "Runtime.exceptionThrown":
            thrown = told["exceptionDetails"]
            self.problems.append(thrown.get("exception", {}).get("description", thrown["text"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def size(self, width: int, height: int = 900) -> None:
        """Give the page so many pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def theme(self, name: str) -> None:
        """Prefer `light` or `dark` colours."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Go to a page; returns once its scripts run."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return what an expression, or the promise of one, comes to."""
        told = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, (script, told["exceptionDetails"])
        return told["result"].get("value")

    def wait(self, script: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until an expression is true in JavaScript's eyes: an element is."""
        end = time.monotonic() + seconds
        found = False
        while not found:
            assert time.monotonic() < end, f"not within {seconds} s: {script}: {self.problems[-3:]}"
            with contextlib.suppress(Navigated):
                found = self.run(f"Boolean({script})")
            time.sleep(0 if found else 0.02)

    def text(self, selector: str) -> str:
        """Return the text of the first element, "" if there is none."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and let go of a key, wherever the focus is."""
        code, number = KEYS[key]
        text = {"text": key} if len(key) == 1 else {}
        about = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        about["modifiers"] = 8 if shift else 0
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        x, y, width, height = self.box(selector)
        self._mouse("mousePressed", x + width / 2, y + height / 2)
        self._mouse("mouseReleased", x + width / 2, y + height / 2)

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag over an element from one share of its width to another."""
        x, y, width, height = self.box(selector)
        self._mouse("mouseMoved", x + begin * width, y + height / 2)
        self._mouse("mousePressed", x + begin * width, y + height / 2)
        for share in (0.5, 1.0):
            self._mouse("mouseMoved", x + (begin + share * (end - begin)) * width, y + height / 2)
        self._mouse("mouseReleased", x + end * width, y + height / 2)

    def double_click(self, selector: str) -> None:
        """Click twice on the middle of an element."""
        x, y, width, height = self.box(selector)
        for count in (1, 2):
            self._mouse("mousePressed", x + width / 2, y + height / 2, count)
            self._mouse("mouseReleased", x + width / 2, y + height / 2, count)

    def hover(self, selector: str) -> None:
        """Put the pointer on the middle of an element."""
        x, y, width, height = self.box(selector)
        self._mouse("mouseMoved", x + width / 2, y + height / 2)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Return left, top, width and height of an element, in view and no longer moving."""
        look = (
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " one.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const box = one.getBoundingClientRect();"
            " return new Promise((resolve) => requestAnimationFrame(() =>"
            " resolve([box.left, box.top, box.width, box.height]))); })()"
        )
        before, found = None, self.run(look)
        while found != before:
            before, found = found, self.run(look)
        left, top, width, height = found
        return left, top, width, height

    def _mouse(self, kind: str, x: float, y: float, count: int = 1) -> None:
        held = kind != "mouseMoved"
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button="left" if held or self._held else "none",
            buttons=1 if kind == "mousePressed" or (self._held and not held) else 0,
            clickCount=count if held else 0,
        )
        self._held = kind == "mousePressed" or (self._held and not held)

    _held = False

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what is seen, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(data["data"]))
