"""The page of `tapax.view` and TensorBoard, for one log of many sites and steps.

    python -m benchmarks.viewer [SITES STEPS]

The benchmark writes the log twice, as JSON lines and as TensorBoard's events, with equal numbers.
It measures the file that `save` writes, the time to save, and the time of a browser to draw the
file with all steps. `tapax view` and TensorBoard start from the log: it measures their time to
know all sites and to show the steps that they have read by then. It zooms the heat map of the saved
file, and scrolls its table of sites. Then it follows a smaller log: it writes a record, and a
browser draws it. Last, it opens a capture of 400 sites.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

import tapax
from benchmarks.measure import MIB, Result, show
from tapax import sink
from tapax.viewer._format import EXACT_BYTES
from tapax.viewer._page import make_page
from tests.viewer.chromium import PAGE, Chromium

DRAWN = f"(x => x?.numbers?.length || x?.cells?.length)({PAGE}?.tapaxPage?.inspect().drawn)"
FIRST_VIEW_SECONDS = 3.0
CAPTURE_SECONDS = 1.0
FRAME_MILLISECONDS = 50.0
UPDATE_SECONDS = 1.0
SAVED_OVER_FLOATS = 0.6
SAVED_OVER_BOARD = 0.2

ZOOM = """
    const canvas = root.querySelector("canvas.plot");
    const { left, top } = canvas.getBoundingClientRect();
    const move = (i) => canvas.dispatchEvent(new WheelEvent("wheel", {
      clientX: left + 600, clientY: top + 300, bubbles: true,
      deltaY: i < 25 ? -120 : 120, shiftKey: i % 3 == 0,
    }));
"""
"""Make the function `move`, which turns the wheel over the heat map: in 25 times, then out."""
SCROLL = """
    const table = root.querySelector(".table-scroller");
    const move = (i) => { table.scrollTop += 157; };
"""


def measured(sites: int, steps: int, rounds: int) -> list[Result]:
    """Measure a log of `sites` and `steps`; draw and follow it `rounds` times."""
    names = [f"GPT/blocks/{i // 8}/part{i % 8}" for i in range(sites)]
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Chromium()) as browser:
        log, events, page = (Path(folder) / name for name in ("run.jsonl", "events", "run.html"))
        write_logs(names, steps, log, events)
        start = time.perf_counter()
        make_page(log).save(page)
        saving = time.perf_counter() - start
        times = [
            (_draw(browser, page), _draw_served(browser, log), _time_tensorboard(events, sites))
            for _ in range(rounds)
        ]
        shown, served, board = (statistics.median(column) for column in zip(*times, strict=True))
        zoomed, scrolled = _time_frames(browser, page, ZOOM), _time_frames(browser, page, SCROLL)
        followed = _follow(browser, Path(folder) / "followed.jsonl", names[:400], rounds)
        size = page.stat().st_size / MIB
        capture, captured = Path(folder) / "taps.safetensors", Path(folder) / "taps.html"
        make_capture(400).save(capture)
        make_page(capture).save(captured)
        opened = statistics.median(_draw(browser, captured) for _ in range(rounds))
        viewed = statistics.median(_draw_served(browser, capture) for _ in range(rounds))
    topic = f"page, {sites} sites x {steps} steps"
    floats = 4 * sites * steps
    # `save` keeps a small log exactly, and most of the file is then the page itself.
    bar = SAVED_OVER_FLOATS if floats > EXACT_BYTES else None
    return [
        Result(topic, "saved file over float32", size, floats / MIB, "MiB", bar),
        Result(topic, "saving, over a minute", saving, 60, "s"),
        Result(topic, "first view, over its bar", shown, FIRST_VIEW_SECONDS, "s", 1.0),
        Result(topic, "saved, over TensorBoard's first chart", shown, board, "s", SAVED_OVER_BOARD),
        Result(topic, "`tapax view`, over TensorBoard's first chart", served, board, "s"),
        Result(topic, "zoom, a frame, over its bar", zoomed, FRAME_MILLISECONDS, "ms", 1.0),
        Result(topic, "scroll, a frame, over its bar", scrolled, FRAME_MILLISECONDS, "ms", 1.0),
        Result(
            "page", "record written until drawn, over its bar", followed, UPDATE_SECONDS, "s", 1.0
        ),
        Result(
            "page",
            "400 captured sites, first view, over its bar",
            opened,
            CAPTURE_SECONDS,
            "s",
            1.0,
        ),
        Result("page", "400 captured sites, `tapax view`, over a second", viewed, 1.0, "s"),
    ]


def make_capture(sites: int) -> tapax.Taps:
    """Capture values and gradients of a chain of layers."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        for i in range(sites // 2):
            with tapax.scope(f"GPT/blocks/{i}"):
                x = x + tapax.sow(jnp.tanh(tapax.sow(x @ w, "up")), "mlp")
        return jnp.mean(x**2)

    x, w = (jax.random.normal(jax.random.key(n), (64, 64)) / 8 for n in range(2))
    return tapax.capture(jax.value_and_grad(loss))(x, w)[1]


def write_logs(names: list[str], steps: int, log: Path, events: Path) -> None:
    """Write one run as JSON lines, and as the events of TensorBoard."""
    events.mkdir()
    rng = np.random.default_rng(0)
    level = np.exp(rng.normal(size=len(names)))
    writer = _EventWriter([f"{name}/value_rms" for name in names])
    with open(log, "w") as lines, open(events / "events.out.tfevents.0.host", "wb") as board:
        writer.begin(board)
        for step in range(steps):
            # The logarithm is a random walk, like statistics of layers in training.
            level *= np.exp(0.01 * rng.normal(size=len(names)))
            numbers = level.astype(np.float32)
            values = ", ".join(
                f'"{name}/value_rms": {x}' for name, x in zip(names, numbers.tolist(), strict=True)
            )
            lines.write(f'{{"tapax": 1, "step": {step}, "record": {{{values}}}}}\n')
            writer.write(board, step, numbers)


class _EventWriter:
    """A writer of events with one number for each tag, in TensorBoard's format.

    Only the numbers, the time and the step differ between the bytes of two events.
    """

    def __init__(self, tags: list[str]):
        parts, self._places = [], np.empty(len(tags), np.int64)
        length = 0
        for i, tag in enumerate(tags):
            content = _field(1, tag.encode()) + b"\x15"
            value = b"\x0a" + _varint(len(content) + 4) + content
            self._places[i] = length + len(value)
            parts += [value, bytes(4)]
            length += len(value) + 4
        self._summary = np.frombuffer(b"".join(parts), np.uint8).copy()

    def begin(self, file: IO[bytes]) -> None:
        self._append(file, b"\x09" + struct.pack("<d", 0.0) + _field(3, b"brain.Event:2"))

    def write(self, file: IO[bytes], step: int, numbers: np.ndarray) -> None:
        content = numbers.astype("<f4").view(np.uint8).reshape(-1, 4)
        for i in range(4):
            self._summary[self._places + i] = content[:, i]
        head = b"\x09" + struct.pack("<d", float(step)) + b"\x10" + _varint(step)
        self._append(file, head + _field(5, self._summary.tobytes()))

    def _append(self, file: IO[bytes], event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        # The data server checks the checksum of the length, but that of the event only on request.
        file.write(length + struct.pack("<I", _masked_crc(length)) + event + bytes(4))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _masked_crc(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _draw(browser: Chromium, page: Path) -> float:
    tab = browser.open(page, wait=DRAWN)
    seconds = tab.seconds
    tab.close()
    return seconds


def _time_frames(browser: Chromium, page: Path, setup: str) -> float:
    """Return the median milliseconds from a `move` until the browser has drawn it."""
    tab = browser.open(page, wait=DRAWN)
    if setup is SCROLL:
        tab.show("sites")
    times = tab.evaluate(
        f"""(async () => {{
          {setup}
          const times = [];
          for (let i = 0; i < 40; i++) {{
            const start = performance.now();
            move(i);
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            times.push(performance.now() - start);
          }}
          return times;
        }})()"""
    )
    tab.close()
    return statistics.median(times)


def _draw_served(browser: Chromium, log: Path) -> float:
    """Return the seconds from the start of `tapax view` to a heat map of all sites, some steps."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "tapax", "view", str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""},
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        tab = browser.open(address, wait=DRAWN)
        seconds = time.perf_counter() - start
        tab.close()
        return seconds
    finally:
        process.terminate()
        process.communicate()


def _time_tensorboard(events: Path, tags: int) -> float:
    """Return the seconds until TensorBoard has listed all tags, and read some steps of one tag."""
    with _tensorboard(events) as (start, address):
        while True:
            listed = _ask(f"{address}/data/plugin/scalars/tags") or {}
            known = [tag for run in listed.values() for tag in run]
            if len(known) >= tags:
                chart = _ask(f"{address}/data/plugin/scalars/scalars?run=.&tag={known[0]}") or []
                if chart:
                    return time.perf_counter() - start
            time.sleep(0.1)


@contextlib.contextmanager
def _tensorboard(events: Path) -> Iterator[tuple[float, str]]:
    """Start TensorBoard with its data server; yield the time of the start, and its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(events)]
    command += ["--load_fast=true", "--port=0", "--reload_interval=1"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if " at http://" in line:
                yield start, "http://" + line.split(" at http://")[1].split("/")[0]
                return
        raise RuntimeError("TensorBoard did not start.")
    finally:
        process.terminate()
        process.communicate()


def _ask(address: str) -> Any:
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            return json.loads(response.read())
    except OSError:
        return None


def _follow(browser: Chromium, path: Path, names: list[str], rounds: int) -> float:
    """Return the median seconds from the start of writing a record to its number on the page."""
    log = sink.jsonl(path)
    log(0, {f"{name}/value_rms": 1.0 for name in names})
    delays = []
    with make_page(path) as page:
        tab = browser.open(page.serve())
        for step in range(1, rounds + 3):
            start = time.perf_counter()
            log(step, {f"{name}/value_rms": 1.0 + step for name in names})
            tab.wait(f"drawn.width === {step + 1}")
            delays.append(time.perf_counter() - start)
        tab.close()
    return statistics.median(delays)


if __name__ == "__main__":
    chosen = [int(number) for number in sys.argv[1:]] or [10_000, 10_000]
    show(measured(chosen[0], chosen[1], 5))
