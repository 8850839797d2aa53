"""Opens every page of the built docs in headless Chromium, 1280 pixels wide, and names what a reader would see wrong.

.venv/bin/mkdocs build --site-dir SITE
.venv/bin/python tools/pages.py SITE [--screenshots DIR]

Reported are text, tables, formulas and pictures that end right of their column, also where a reader can scroll to their
end; formulas and pictures that are not rendered; and requests for anything outside SITE, because the docs must be
readable without a network. The exit code is 1 if something is reported. scripts/setup_browser.sh installs Chromium.
"""

import argparse
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

WIDTH = 1280
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe"
).split()
TIMEOUT = 120  # seconds without any answer of the browser

# Material moves each table into a wrapper when the page has loaded.
LOADED = """(async () => {
  const frame = () => new Promise(requestAnimationFrame);
  const bare = () => [...document.querySelectorAll("article table")].some(t => !t.closest(".md-typeset__table"));
  while (document.readyState !== "complete" || bare()) await frame();
  await frame();
})()"""

FAULTS = """(() => {
  const article = document.querySelector("article");
  const right = article.getBoundingClientRect().right;
  const blocks = "table, pre, math, img, li, p, h1, h2, h3";
  const wide = new Map(), faults = [];
  const add = (element, excess) => {
    const block = element.closest(blocks) || element.querySelector(blocks) || element;
    if (excess > 1) wide.set(block, Math.max(excess, wide.get(block) || 0));
  };
  for (const element of article.querySelectorAll("*")) {
    add(element, element.clientWidth && element.scrollWidth - element.clientWidth);
    if (element.matches("table, img, math")) add(element, element.getBoundingClientRect().right - right);
    if (element.matches("img") && !element.naturalWidth) faults.push("not loaded: " + element.getAttribute("src"));
  }
  const texts = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, range = document.createRange();
    range.selectNode(text);
    for (const box of range.getClientRects()) add(text.parentElement, box.right - right);
    if (/\\$|\\\\[a-z([]/.test(text.data) && !text.parentElement.closest("code"))
      faults.push("not rendered: " + text.data.trim());
  }
  for (const [block, excess] of wide) {
    const words = (block.textContent || block.getAttribute("src")).trim().replace(/\\s+/g, " ").slice(0, 60);
    faults.push(`${Math.ceil(excess)} pixels too wide: ${block.localName} "${words}"`);
  }
  return faults;
})()"""


class Browser:
    """A page of Chromium, driven over its DevTools pipe: NUL-terminated JSON, one object per message."""

    def __init__(self, read: int, write: int):
        self._read, self._write = read, write
        self._received, self._num_calls, self._session = b"", 0, {}
        self.events: list[dict] = []
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]}
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        self.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=900, deviceScaleFactor=1, mobile=False)

    def message(self) -> dict:
        """Return the next message of the browser."""
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], TIMEOUT)
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("Chromium ended" if ready else f"Chromium said nothing for {TIMEOUT} s")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params) -> dict:
        """Call a method of the DevTools protocol and return its result; events that come first are kept."""
        self._num_calls += 1
        request = {"id": self._num_calls, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while (message := self.message()).get("id") != self._num_calls:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def evaluate(self, expression: str):
        """Return the value of a JavaScript expression, or of its promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Open a page and wait until it looks as a reader will see it."""
        self.events.clear()
        loader = self.call("Page.navigate", url=url)["loaderId"]
        loaded = {"loaderId": loader, "name": "load"}.items()
        while not any(loaded <= event.get("params", {}).items() for event in self.events):
            self.events.append(self.message())
        self.evaluate(LOADED)

    def requests(self) -> set[str]:
        """Return the addresses that the open page has asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return {event["params"]["request"]["url"] for event in sent}

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page, also of the part below the window."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = dict(x=0, y=0, width=WIDTH, height=size["height"], scale=1)
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        file.write_bytes(base64.b64decode(picture))


@contextmanager
def browser():
    """Start Chromium with an empty profile, and end it afterwards."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if not program:
        raise FileNotFoundError(f"none of {', '.join(PROGRAMS)} is installed: bash scripts/setup_browser.sh")
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads calls from file descriptor 3 and writes to 4.
        command = f'exec "$@" 3<&{to_read} 4>&{from_write}'
        process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Browser(from_read, to_write)
        finally:
            os.close(to_write)  # at the end of its pipe the browser closes
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_read)


def find_faults(site: Path, screenshots: Path | None = None) -> dict[str, list[str]]:
    """Return what is wrong with each page of a built site, by the page's path."""
    site, found = site.resolve(), {}
    with browser() as opened:
        for page in sorted(site.rglob("*.html")):
            if page.name == "404.html":
                continue
            name = str(page.relative_to(site))
            opened.open(page.as_uri())
            found[name] = opened.evaluate(FAULTS)
            outside = [url for url in opened.requests() if not url.startswith((site.as_uri(), "data:", "blob:"))]
            found[name] += [f"not in the site: {url}" for url in sorted(outside)]
            if screenshots:
                opened.screenshot(screenshots / f"{'-'.join(page.relative_to(site).with_suffix('').parts)}.png")
    return found


def main() -> int:
    """Print every fault and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.screenshots:
        args.screenshots.mkdir(parents=True, exist_ok=True)
    found = find_faults(args.site, args.screenshots)
    for page, faults in found.items():
        for fault in faults:
            print(f"{page}: {fault}")
    num_faults = sum(map(len, found.values()))
    print(f"{len(found)} pages, {num_faults} faults")
    return 1 if num_faults or not found else 0


if __name__ == "__main__":
    sys.exit(main())
