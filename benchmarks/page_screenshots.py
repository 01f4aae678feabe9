"""Pictures of the page of `ttmem serve`, of a real server with a real memory.

    python benchmarks/page_screenshots.py [-o docs/figures] [--data FOLDER]

It starts a server, compacts the demo document's first chapters with the preset quick and a few updates of training, so
that there is a curve, asks one question of the memory and of the full context, and takes the page as it is: while the
document is compacted, and afterwards, on a desk in the light and on a phone in the dark. Figures in the pictures are
those of the machine it ran on. With --data the folder stays, and a memory that is there is not made again. Needs
chromium and chromium-driver, and the packages selenium and pillow.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from ttmem.demo import document

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "serving"))
from browser import browser, missing  # noqa: E402 (the page's tests have it)

CHAPTERS_END = "3. Getting here"
QUESTION = "What is the name of the station's cook?"
NAME = "skarrholm"
JOB = {
    "name": NAME,
    "ratio": 8,
    "preset": "quick",
    "settings": {
        "rollouts": 24,
        "distill_updates": 40,
        "distill_lr": 0.01,
        "relative_rate": True,
        "distill_passages": 2,
        "lm_weight": 0.0,
        "decay": True,
    },
    "keep_document": True,
}
MOST_BYTES = 150_000
COLOURS = 256
PATIENCE = 1800.0
"""Seconds for anything on the page to happen."""


def start_server(data: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """`ttmem serve` on a free port, with the bundled model."""
    command = [sys.executable, "-m", "ttmem.cli.main", "serve", "--port", "0", "--data", str(data)]
    process = subprocess.Popen(command, stderr=log.open("w"))
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and json.loads(line).get("event") == "listening":
                return process, json.loads(line)["url"]
        time.sleep(0.2)
    raise SystemExit(log.read_text())


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit("the page does not come to where it should be")
        time.sleep(0.2)


def text(driver: Any, selector: str) -> str:
    found = driver.find_elements("css selector", selector)
    return str(found[0].text) if found else ""


def picture(driver: Any, target: Path, width: int, height: int, start: str = "body") -> None:
    """`height` pixels of the page from an element on, or less where it ends, with few colours, so that it is small."""
    from PIL import Image

    driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    top = int(driver.execute_script(f"return document.querySelector('{start}').getBoundingClientRect().top"))
    length = min(height, int(driver.execute_script("return document.documentElement.scrollHeight")) - top)
    clip = {"x": 0, "y": top, "width": width, "height": length, "scale": 1}
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    image = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
    image = image.quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(target, optimize=True)
    size = target.stat().st_size
    print(f"{target}: {image.width} x {image.height}, {size:,} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{target} is larger than {MOST_BYTES:,} bytes: lower COLOURS or its height")


def ask(driver: Any) -> None:
    until(lambda: "entries for" in text(driver, "#budget"))
    driver.execute_script("document.getElementById('format').value = 'plain'")
    driver.execute_script("document.getElementById('length').value = 32")
    driver.find_element("css selector", "#question").send_keys(QUESTION)
    driver.find_element("css selector", "#ask-button").click()
    for kind in ("memory", "full"):
        until(lambda kind=kind: text(driver, f"#answer-{kind} [data-figure=read]") not in ("", "–"))


def take(url: str, folder: Path) -> None:
    client = httpx2.Client(base_url=url, timeout=600)
    found = client.get(f"/v1/memories/{NAME}").json()
    if "id" not in found:
        body = {**JOB, "text": document().partition(CHAPTERS_END)[0].strip()}
        answer = client.post("/v1/memories", json=body)
        answer.raise_for_status()
        found = answer.json()
    address = f"{url}/#{found['id']}"
    if found["status"] in ("queued", "running"):
        with browser(1280, 900) as driver:
            driver.get(address)
            shown = "return (document.querySelector('.curve polyline')?.points.length ?? 0) >= 16"
            until(lambda: driver.execute_script(shown) or text(driver, "#detail-status") == "ready")
            picture(driver, folder / "page-compacting.png", 1280, 900)
            until(lambda: text(driver, "#detail-status") not in ("waiting", "compacting"))
            if text(driver, "#detail-status") != "ready":
                raise SystemExit(text(driver, "#detail-status"))
    with browser(1280, 900) as driver:
        driver.get(address)
        ask(driver)
        picture(driver, folder / "page-desk.png", 1280, 1760)
    with browser(390, 844, dark=True) as driver:
        driver.get(address)
        ask(driver)
        picture(driver, folder / "page-phone-dark.png", 390, 2100, "#detail")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--data", type=Path, default=None, help="a data folder that stays")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        process, url = start_server(arguments.data or Path(temporary) / "data", Path(temporary) / "log")
        try:
            take(url, arguments.output)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
