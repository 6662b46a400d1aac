"""What a model is asked: pictures, a clip and a tone that a seed fixes, as questions. No model's own format is known.

Every question is greedy and names its media by seed, so that two servers are asked the same bytes and a seed that was
not used before is an item that no cache has.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import math
import tempfile
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.workloads.synthetic import demo_image
from epd_serve.demo.pictures import draw, scene

SIDE = 448
CLIP_SIDE, CLIP_FRAMES, CLIP_RATE = 224, 8, 4.0
AUDIO_RATE, AUDIO_S = 16_000, 2.0
TEXT = "Name three uses of a paper clip."
ASKED = {
    "image": "What is in the picture?",
    "video": "What happens in the video?",
    "audio": "What do you hear?",
}


@dataclass(frozen=True)
class Question:
    """A prompt of one turn: so many items of each modality, then text.

    Attributes:
        name: what the report calls it. items: (modality, seed), in their order.
    """

    name: str
    items: tuple[tuple[str, int], ...] = ()

    @property
    def modalities(self) -> frozenset[str]:
        return frozenset(modality for modality, _ in self.items)

    def body(self, model: str, max_tokens: int) -> dict[str, Any]:
        """Of /v1/chat/completions, greedy."""
        text = ASKED[self.items[-1][0]] if self.items else TEXT
        content = [*(_part(modality, seed) for modality, seed in self.items), {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


QUESTIONS = (
    Question("text"),
    Question("image", (("image", 1),)),
    Question("another image", (("image", 2),)),
    Question("the image again", (("image", 1),)),
    Question("two images", (("image", 3), ("image", 4))),
    Question("video", (("video", 5),)),
    Question("audio", (("audio", 6),)),
    Question("image and video", (("image", 7), ("video", 8))),
    Question("image and audio", (("image", 9), ("audio", 10))),
)
"""One modality alone comes before its mixtures, which are asked only where the model takes all of theirs."""


def unmade() -> dict[str, str]:
    """Modalities that this environment cannot make items of, and why."""
    return {} if importlib.util.find_spec("cv2") else {"video": "no cv2 here to make a clip with"}


def _part(modality: str, seed: int) -> dict[str, Any]:
    if modality == "audio":
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(tone(seed)).decode(), "format": "wav"}}
    if modality == "image":
        return {"type": "image_url", "image_url": {"url": demo_image(seed, SIDE).url}}
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(clip(seed)).decode()}"}}


def clip(seed: int) -> bytes:
    """An MP4 of two seconds: one scene, then another. Needs cv2."""
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), CLIP_RATE, (CLIP_SIDE, CLIP_SIDE))
        for frame in range(CLIP_FRAMES):
            pixels = np.array(draw(scene(2 * seed + 2 * frame // CLIP_FRAMES), CLIP_SIDE))
            writer.write(np.ascontiguousarray(pixels[:, :, ::-1]))
        writer.release()
        return path.read_bytes()


def tone(seed: int) -> bytes:
    """A WAV whose pitch rises from one that the seed chooses."""
    t = np.arange(int(AUDIO_S * AUDIO_RATE)) / AUDIO_RATE
    samples = 0.5 * np.sin(2 * math.pi * 200 * (seed + 1) * t * (1 + 0.3 * t))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(AUDIO_RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()
