"""A headless Chromium by its DevTools protocol: what a page shows, says on its console, asks the network for, and does with keys."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 20.0
DESK, PHONE = (1280, 900), (390, 844)
_KEYS = {
    "Tab": (9, ""), "Enter": (13, "\r"), "ArrowLeft": (37, ""), "ArrowUp": (38, ""), "ArrowRight": (39, ""), "ArrowDown": (40, ""),
    "PageUp": (33, ""), "PageDown": (34, ""), "+": (187, "+"), "n": (78, "n"), "End": (35, ""),
}  # fmt: skip


def program():
    """Where Chromium is, ``None`` without one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def started(folder):
    """A browser with an empty profile in ``folder``."""
    arguments = [
        program(), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--remote-allow-origins=*",
        f"--user-data-dir={folder}", "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-extensions", "--disable-sync", "--hide-scrollbars", "--disable-dev-shm-usage", "about:blank",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Browser(_address(folder / "DevToolsActivePort", process))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _address(path, process):
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit and process.poll() is None:
        with suppress(OSError, ValueError):
            port, place = path.read_text().split("\n")[:2]
            return f"ws://127.0.0.1:{int(port)}{place}"
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not start: {(path.parent / 'log').read_text()[-2000:]}")


class Browser:
    def __init__(self, address):
        self._socket = websocket.create_connection(address, timeout=LIMIT_S, enable_multithread=False)
        self._number = 0
        self.tabs = {}

    def call(self, method, session=None, **values):
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": values} | ({} if session is None else {"sessionId": session})
        self._socket.send(json.dumps(message))
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self):
        answer = json.loads(self._socket.recv())
        if (tab := self.tabs.get(answer.get("sessionId"))) is not None and "method" in answer:
            tab.heard(answer["method"], answer["params"])
        return answer

    @contextmanager
    def tab(self, url=None, size=DESK, theme="light"):
        """A tab of its own, with nothing remembered from others; empty without an address."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self.tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.call("Security.setIgnoreCertificateErrors", ignore=True)
        tab.resize(size)
        tab.theme(theme)
        if url is not None:
            tab.open(url)
        try:
            yield tab
        finally:
            del self.tabs[session]
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """``problems``: what the console said; ``requests``: addresses; ``failed``: those that were not answered."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session
        self.problems, self.requests = [], []

    def heard(self, method, values):
        if method == "Runtime.exceptionThrown":
            self.problems.append(values["exceptionDetails"].get("exception", {}).get("description", str(values)))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.problems.append(str([one.get("value") for one in values["args"]]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def call(self, method, **values):
        return self._browser.call(method, self._session, **values)

    def resize(self, size):
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=size[0] < 600)

    def theme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """The value of an expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition, limit_s=LIMIT_S):
        limit = time.monotonic() + limit_s
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < limit, f"not within {limit_s} s: {condition}; {self.run('document.body.innerText')[:2000]}"
            time.sleep(0.02)

    def key(self, name, *, shift=False):
        code, text = _KEYS[name]
        values = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **values)
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def mouse(self, kind, x, y, **values):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1, **values)

    def click(self, x, y):
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def picture(self, name, folder):
        """A screenshot of the whole page, kept in the folder of MEGASCALE_SCREENSHOTS, else in ``folder``."""
        kept = Path(os.environ.get("MEGASCALE_SCREENSHOTS") or folder)
        kept.mkdir(parents=True, exist_ok=True)
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path = kept / f"{name}.png"
        path.write_bytes(base64.b64decode(answer["data"]))
        return path
