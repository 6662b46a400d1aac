"""Pictures by a browser, kept beside this file: `python -m tests.demo_model.foreign.browser` makes them anew.

Owns `browser.zip`: the pictures that a headless Chromium drew by `browser.html`, and scenes.json, which says what is in
them. They are kept so that evaluating needs no browser. Another version of Chromium may draw other pixels.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from epd_serve.demo.pictures import Shape
from tests.demo_model.foreign.sketches import Sketch, sketch
from tests.demo_model.scenes import Scene

KEPT = Path(__file__).with_name("browser.zip")
_GENERATORS = ("canvas", "svg")
_PAGE = Path(__file__).with_name("browser.html")
_INDEX = "scenes.json"
_SEED = 2026
_NUMBER = 40  # pictures per generator and number of shapes
_FILES = ("image/webp", "image/jpeg")
_SHARES = (0.9, 0.1)
_LIMIT_S = 120


def kept(generator: str, shapes: int) -> list[Scene]:
    """The kept pictures of one generator with so many shapes, in the order in which they were drawn."""
    with zipfile.ZipFile(KEPT) as archive:
        entries = json.loads(archive.read(_INDEX))
        return [
            Scene(
                tuple(Shape(**shape) for shape in it["shapes"]),
                it["background"],
                tuple(it["size"]),
                archive.read(it["name"]),
            )
            for it in entries
            if it["generator"] == generator and len(it["shapes"]) == shapes
        ]


def _described(generator: str, made: Sketch, chance: np.random.Generator) -> dict[str, Any]:
    """A sketch as browser.html takes it, with all the chance that it needs."""
    shapes = [
        {"colour": shape.colour, "kind": shape.kind, "draw": chance.random(), **dataclasses.asdict(place)}
        for shape, place in zip(made.shapes, made.places, strict=True)
    ]
    return {
        "generator": generator,
        "size": made.size,
        "background": made.background,
        "shapes": shapes,
        "draws": chance.random(8).tolist(),
        "file": str(chance.choice(_FILES, p=_SHARES)),
    }


def _drawn(described: list[dict[str, Any]], chromium: str) -> list[bytes]:
    """The files of the pictures, from a browser that ends with this."""
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "page.html"
        page.write_text(_PAGE.read_text(encoding="utf-8").replace("SKETCHES", json.dumps(described)), encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=60000",
            f"--user-data-dir={scratch}/u",
        ]
        done = subprocess.run(
            [chromium, *flags, "--dump-dom", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    urls = json.loads(done.stdout.split('<pre id="pictures">')[1].split("</pre>")[0])
    return [base64.b64decode(url.split(",")[1]) for url in urls]


def main() -> int:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("no Chromium in PATH", file=sys.stderr)
        return 1
    sketches: list[tuple[str, Sketch]] = []
    described = []
    for number, generator in enumerate(_GENERATORS):
        for shapes in (1, 2, 3):
            for index in range(_NUMBER):
                chance = np.random.default_rng([_SEED, number, shapes, index])
                made = sketch(chance, shapes, small=True)
                sketches.append((generator, made))
                described.append(_described(generator, made, chance))
    files = _drawn(described, chromium)
    index_entries = []
    with zipfile.ZipFile(KEPT, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, ((generator, made), it, data) in enumerate(zip(sketches, described, files, strict=True)):
            name = f"{number:03}.{it['file'].split('/')[1]}"
            archive.writestr(zipfile.ZipInfo(name), data)
            shapes_of = [dataclasses.asdict(shape) for shape in made.shapes]
            entry = {"name": name, "generator": generator, "size": made.size, "background": made.background}
            index_entries.append({**entry, "shapes": shapes_of})
        index_file = zipfile.ZipInfo(_INDEX)
        index_file.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(index_file, json.dumps(index_entries))
    print(f"{KEPT}: {len(files)} pictures, {KEPT.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
