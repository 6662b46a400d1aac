"""Pictures, clips and tones that a seed fixes, as content parts: what the tiny random models are asked."""

from __future__ import annotations

import base64
import io
import math
import tempfile
import wave
from pathlib import Path

import numpy as np

from epd_serve.demo.pictures import draw, scene
from tests.e2e.bodies import Body, image_part, png

CLIP_SIZE = (112, 112)
CLIP_FRAMES = 8
AUDIO_RATE = 16_000


def clip(seed: int) -> bytes:
    """An MP4 of two seconds: one scene, then another."""
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 4.0, CLIP_SIZE)
        for frame in range(CLIP_FRAMES):
            picture = np.array(draw(scene(seed + frame // 4), CLIP_SIZE))
            writer.write(np.ascontiguousarray(picture[:, :, ::-1]))
        writer.release()
        return path.read_bytes()


def tone(seed: int, seconds: float = 1.5) -> bytes:
    """A WAV whose pitch rises from one that the seed chooses."""
    t = np.arange(int(seconds * AUDIO_RATE)) / AUDIO_RATE
    samples = 0.5 * np.sin(2 * math.pi * 200 * (seed + 1) * t * (1 + 0.3 * t))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(AUDIO_RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def part(item: str) -> Body:
    """`image 3` → the content part of picture 3; likewise `video` and `audio`."""
    modality, number = item.split()
    seed = int(number)
    if modality == "image":
        return image_part(png(draw(scene(seed), 160 + 32 * (seed % 3))))
    if modality == "video":
        data = base64.b64encode(clip(seed)).decode()
        return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(tone(seed)).decode(), "format": "wav"}}
