"""A real Chromium, driven through `driver.mjs`: tabs open pages, act on them and read them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = "document.getElementById('tapax-page')"
IS_SHOWN = f"{PAGE}?.tapaxPage?.inspect().view"


class Chromium:
    """A browser; `open` makes a tab, and closing the browser closes its tabs."""

    def __init__(self) -> None:
        prepared = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "page.py"), "--browser"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        self._process = subprocess.Popen(
            [prepared.stdout.strip(), str(Path(__file__).parent / "driver.mjs"), str(ROOT / "web")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"command": command, **arguments}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "the browser is gone"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def open(
        self,
        page: str | Path,
        address: str = "",
        *,
        size: tuple[int, int] = (1280, 800),
        dark: bool = False,
        wait: str = IS_SHOWN,
    ) -> Tab:
        """Open a file or a URL, and wait until the browser shows the page."""
        url = page.resolve().as_uri() if isinstance(page, Path) else page
        width, height = size
        made = self.call(
            "open", url=url + address, width=width, height=height, dark=dark, wait=wait
        )
        return Tab(self, made["tab"], made["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


class Tab:
    """A page in the browser, which took `seconds` to appear."""

    def __init__(self, browser: Chromium, number: int, seconds: float):
        self._browser = browser
        self._number = number
        self.seconds = seconds

    def _call(self, command: str, **arguments: Any) -> Any:
        return self._browser.call(command, tab=self._number, **arguments)

    def evaluate(self, script: str) -> Any:
        """Evaluate an expression of `page`, the page, and `root`, its shadow root."""
        return self._call(
            "evaluate",
            script=f"(() => {{ const page = {PAGE}.tapaxPage, root = {PAGE}.shadowRoot; "
            f"return {script}; }})()",
        )

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Wait until a condition on `page`, `root` and `drawn` holds."""
        script = (
            f"(() => {{ const page = {PAGE}.tapaxPage, root = {PAGE}.shadowRoot; "
            "const { drawn, series } = page.inspect(); "
            f"return Boolean(drawn && ({condition})); }})()"
        )
        self._call("wait", script=script, timeout=1000 * seconds)

    def show(self, view: str, condition: str = "drawn", **change: Any) -> Any:
        """Go to a view, wait until it is drawn, and return its report of what it drew."""
        self.set(view=view, **change)
        self.wait(condition)
        return self.drawn

    def set(self, **change: Any) -> None:
        """Change the state, as the controls do."""
        self.evaluate(f"page.store.set({json.dumps(change)})")

    @property
    def drawn(self) -> Any:
        """Return the view's report of what it drew, with strings for numbers that JSON lacks."""
        return self.evaluate(
            "JSON.parse(JSON.stringify(page.inspect().drawn, "
            "(_, x) => typeof x === 'number' && !Number.isFinite(x) ? String(x) : x))"
        )

    @property
    def state(self) -> Any:
        return self.evaluate("page.inspect().state")

    def pixel(self, canvas: str, x: float, y: float) -> list[int]:
        """Return the colour at a position of a canvas."""
        return self.evaluate(
            f"[...root.querySelector({canvas!r}).getContext('2d')"
            f".getImageData({x}, {y}, 1, 1).data]"
        )

    def navigate(self, url: str) -> None:
        """Go to another document, and wait until it is loaded."""
        self._call("navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        self._call("resize", width=width, height=height)

    def use_dark(self, dark: bool) -> None:
        """Prefer dark colours, or light ones."""
        self._call("media", dark=dark)

    def run(self, script: str) -> Any:
        """Return the value of an expression in any document."""
        return self._call("evaluate", script=script)

    def wait_for(self, condition: str, seconds: float = 20) -> None:
        """Wait until a condition on any document holds."""
        self._call("wait", script=condition, timeout=1000 * seconds)

    def take_seen(self) -> dict[str, list[str]]:
        """Return errors, requests and failed requests since the last call."""
        return self._call("takeSeen")

    def click(self, selector: str) -> None:
        self._call("click", selector=selector)

    def fill(self, selector: str, text: str) -> None:
        self._call("fill", selector=selector, text=text)

    def press(self, key: str) -> None:
        self._call("press", key=key)

    def move(self, x: float, y: float) -> None:
        self._call("move", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        self._call("tap", x=x, y=y)

    def text(self, selector: str) -> str:
        return self._call("text", selector=selector)

    def screenshot(self, path: Path) -> None:
        self._call("screenshot", path=str(path))

    def check_quiet(self) -> None:
        """Fail if the page logged an error or made a request."""
        seen = self._call("seen")
        assert not seen["errors"], seen["errors"]
        assert not seen["requests"], seen["requests"]
        own = self.evaluate("page.inspect().errors")
        assert not own, own

    def close(self) -> None:
        self._call("close")
