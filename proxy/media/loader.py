"""Load every media item of a request once, safely, and give it its key.

Owns the order of checks, the bounds over a whole request, and how media are read that are here already: in the body
itself, as data URLs and bare base64, as strictly as vLLM reads them; and `file://` URLs, only from under one directory
that the operator named. How to fetch is `fetch.py`'s, how to judge an image `images.py`'s and a clip `containers.py`'s,
how keys are made `store/keys.py`'s.
"""

from __future__ import annotations

import asyncio
import binascii
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pybase64

from epd_serve.errors import PayloadTooLargeError, RequestError
from epd_serve.image_tokens import tiles_of
from proxy.config.settings import ProxySettings
from proxy.errors import media_refused, media_too_large, most_telling
from proxy.fields.parts import MediaRef, Modality
from proxy.media.containers import inspect_clip, requested_frames
from proxy.media.fetch import Grow, UrlFetcher
from proxy.media.images import inspect_image
from proxy.request.parse import ParsedRequest
from proxy.strict_json import Inlined
from proxy.tenants import FairSemaphore, MemoryReservation
from store.errors import StoreError
from store.keys import feature_key

MAX_SCHEME = 16  # characters looked at: the rest may be megabytes
TOGETHER_BYTES = 256 << 10
"""The items of a request share a thread's turn up to so much: a turn costs as much as a small image. Beyond it each
has its own, so that other requests come in between."""
BYTES_PER_TOKEN = {Modality.AUDIO: 1000, Modality.VIDEO: 500}
"""Compressed files: 25 tokens a second of speech at 200 kbit/s; two frames a second of some 250 tokens at 2 Mbit/s."""
DEFAULT_MIME = {Modality.IMAGE: "image/png", Modality.AUDIO: "audio/wav", Modality.VIDEO: "video/mp4"}
MAX_HEAD = 256  # of a data URL, to its comma


@dataclass(frozen=True)
class LoadedItem:
    """A media item on its way to the stages.

    Attributes:
        ref: where it was. Its `source` is gone: it would hold the client's own words for as long as the request lasts.
        source: data URL (base64 for `input_audio`): what replaces the client's URL.
        key: its feature key, the `uuid` that every stage sees.
        tokens: that an encoder makes of it, at least 1: of an image by the rule of the model's processor, else a guess.
        size_bytes: of the media itself. size: width and height of an image in pixels, else 0.
        tiles: that the tower takes each by itself, of an image; 1 where it does not.
    """

    ref: MediaRef
    source: Inlined
    key: str
    tokens: float
    size_bytes: int = 0
    size: tuple[int, int] = (0, 0)
    tiles: int = 1


class MediaLoader:
    """Loads items. Blocking work runs on a few threads of its own, which accounts get in turns."""

    def __init__(self, settings: ProxySettings, fetcher: UrlFetcher) -> None:
        model = settings.identity
        self._key = partial(feature_key, model=model.model, revision=model.revision, dtype=model.dtype)
        self._image_tokens = settings.image_tokens
        self._limits = settings.media
        self._fetcher = fetcher
        self._threads = ThreadPoolExecutor(settings.media.threads, thread_name_prefix="media")
        self._turns = FairSemaphore(settings.media.threads)
        self._outliving: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.aclose()

    async def load(
        self,
        request: ParsedRequest,
        *,
        tenant: str,
        held: MemoryReservation,
        on_fetched: Callable[[], object] = lambda: None,
    ) -> tuple[LoadedItem, ...]:
        """All items of `request`, in order. Their bytes are counted in `held`.

        Args:
            on_fetched: called where some had to be fetched from other hosts, once they are here.

        Raises:
            RequestError: naming the item at fault. BusyError. What `held.take` raises.
        """
        refs, limits, options = request.media, self._limits, request.processor_options
        if not refs:
            return ()
        if len(refs) > limits.max_items:
            raise RequestError(f"messages: {len(refs)} media items, the limit is {limits.max_items}.", param="messages")
        for ref in refs:
            if ref.key != "input_audio" and _scheme(ref) not in limits.schemes:
                what = f"this server takes URLs of these schemes: {', '.join(limits.schemes) or 'none'}"
                raise media_refused(ref.param, what, "media_scheme")
        videos = any(ref.modality is Modality.VIDEO for ref in refs)
        frames = requested_frames(options, limits.max_frames) if videos else 0
        size_bytes = 0

        def grow(more_bytes: int) -> None:
            nonlocal size_bytes
            size_bytes += more_bytes
            if size_bytes > limits.max_total_bytes:
                raise PayloadTooLargeError(
                    f"messages: media of more than {limits.max_total_bytes:,} bytes in all.", param="messages"
                )

        def grow_held(more_bytes: int) -> None:
            grow(more_bytes)
            held.take(more_bytes)

        fetched = await self._fetched(refs, held.account, grow_held)
        if fetched:
            on_fetched()
        most = {ref.param: self._most_bytes(ref, fetched) for ref in refs}
        turns = [refs] if sum(most.values()) <= TOGETHER_BYTES else [(ref,) for ref in refs]
        item = partial(self._item, fetched=fetched, frames=frames, options=options, tenant=tenant)
        loaded: list[LoadedItem] = []
        for together in turns:
            most_bytes = sum(most[ref.param] for ref in together)
            held.take(most_bytes)
            items = await self._in_turn(item, together, held)
            gone = sum(len(fetched.pop(ref.param, b"")) for ref in together)
            held.give_back(most_bytes + gone - sum(one.source.size_bytes for one in items))
            grow(sum(one.size_bytes for one in items) - gone)
            loaded += items
        return tuple(loaded)

    async def _fetched(self, refs: Iterable[MediaRef], account: str, grow: Grow) -> dict[str, bytearray]:
        """What other hosts have, by the parameter that names it."""
        urls = [ref for ref in refs if _scheme(ref) in ("http", "https")]
        if not urls:
            return {}
        try:
            async with asyncio.TaskGroup() as group:
                fetching = {
                    ref.param: group.create_task(
                        self._fetcher.fetch(ref.source, param=ref.param, account=account, grow=grow)
                    )
                    for ref in urls
                }
        except BaseExceptionGroup as failed:
            raise most_telling(failed) from None
        return {param: task.result() for param, task in fetching.items()}

    def _most_bytes(self, ref: MediaRef, fetched: Mapping[str, bytearray]) -> int:
        """What loading an item takes at most beside what is held of it: its bytes, and as many in base64 as stay."""
        if ref.param in fetched:
            own = len(fetched[ref.param])
            return own + base64_bytes(own)
        if ref.key == "input_audio" or _scheme(ref) == "data":
            return len(ref.source) + len(ref.source) * 3 // 4 + MAX_HEAD
        return self._limits.max_bytes + base64_bytes(self._limits.max_bytes)

    def _bytes_of(self, ref: MediaRef, fetched: Mapping[str, bytearray]) -> tuple[str, bytes, memoryview | None]:
        """(MIME type, bytes, their base64 where the client sent it) of one item."""
        mime, limit = DEFAULT_MIME[ref.modality], self._limits.max_bytes
        if ref.param in fetched:
            return mime, bytes(fetched[ref.param]), None
        if ref.key == "input_audio":
            return mime, *read_base64(ref.source, ref.param, limit)
        if _scheme(ref) == "data":
            return read_data_url(ref.source, ref.param, mime, limit)
        data = read_local(ref.source, root=self._limits.allowed_local_root, max_bytes=limit, param=ref.param)
        return mime, data, None

    def _item(
        self,
        ref: MediaRef,
        *,
        fetched: Mapping[str, bytearray],
        frames: int,
        options: dict[str, object],
        tenant: str,
    ) -> LoadedItem:
        """Loads one item, in a thread."""
        mime, data, inlined = self._bytes_of(ref, fetched)
        if not data:
            raise RequestError(f"{ref.param}: empty.", param=ref.param)
        size, tiles = (0, 0), 1
        if ref.modality is Modality.IMAGE:
            mime, size = inspect_image(data, param=ref.param, max_pixels=self._limits.max_pixels)
            tokens = float(self._image_tokens.tokens(*size))
            tiles = tiles_of(self._image_tokens, *size)
        else:
            tokens = max(len(data) / BYTES_PER_TOKEN[ref.modality], 1.0)
            inspect_clip(data, ref.param, self._limits, frames=frames if ref.modality is Modality.VIDEO else 0)
        try:
            key = self._key(data, processor_options=options, tenant=tenant, modality=ref.modality.value)
        except StoreError as error:
            raise RequestError(f"{', '.join(options)}: {error}.", param=next(iter(options))) from None
        head = b"" if ref.key == "input_audio" else f"data:{mime};base64,".encode("ascii")
        # The client's own base64 where there is some: decoding it was strict, and encoding again takes its time.
        source = Inlined(head, inlined if inlined is not None else pybase64.b64encode(data))
        return LoadedItem(replace(ref, source=""), source, key, tokens, len(data), size, tiles)

    async def _in_turn(
        self, load: Callable[[MediaRef], LoadedItem], refs: Iterable[MediaRef], held: MemoryReservation
    ) -> list[LoadedItem]:
        """Load these in a thread. No thread can be stopped: where the request ends first, its turn and all that it
        holds last until the thread is done."""
        async with AsyncExitStack() as until_done:
            await until_done.enter_async_context(self._turns.turn(held.account))
            running = asyncio.get_running_loop().run_in_executor(self._threads, lambda: [load(ref) for ref in refs])
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                if not running.done():
                    until_done.enter_context(held.handed_over())
                    ending = asyncio.create_task(_close_after(running, until_done.pop_all()))
                    self._outliving.add(ending)
                    ending.add_done_callback(self._outliving.discard)
                raise


async def _close_after(running: asyncio.Future[list[LoadedItem]], held: AsyncExitStack) -> None:
    await asyncio.wait([running])
    await held.aclose()


def source_bytes(refs: Iterable[MediaRef]) -> int:
    """Returns how many bytes the media in the body itself take, as the client wrote them."""
    return sum(len(ref.source) for ref in refs)


def _scheme(ref: MediaRef) -> str:
    return "" if ref.key == "input_audio" else ref.source[:MAX_SCHEME].partition(":")[0].lower()


def read_data_url(url: str, param: str, default_mime: str, max_bytes: int) -> tuple[str, bytes, memoryview]:
    """MIME type, bytes, and their base64 as it stands in `url`.

    Args:
        param: the field to name in errors. default_mime: where the URL names none.

    Raises:
        RequestError: 400, not a data URL of base64. PayloadTooLargeError: 413.
    """
    head, comma, _ = url[:MAX_HEAD].partition(",")
    mime, *attributes = head[len("data:") :].split(";")
    if not comma or "base64" not in (attribute.strip().lower() for attribute in attributes):
        raise media_refused(param, "a data URL must read data:<type>;base64,<data>", "invalid_data_url")
    plain = mime.replace("-", "").replace("+", "").replace(".", "").split("/")
    if not mime.isascii() or not all(part.isalnum() for part in plain):
        mime = ""  # would otherwise be copied into the URL that the stages parse
    return mime or default_mime, *read_base64(url, param, max_bytes, begin=len(head) + 1)


def read_base64(text: str, param: str, max_bytes: int, *, begin: int = 0) -> tuple[bytes, memoryview]:
    """The bytes that `text` stands for from `begin` on, and that as bytes. As strict as vLLM, which reads it with the
    same library. Raises as `read_data_url`."""
    try:
        payload = memoryview(text.encode("ascii"))[begin:]
        if len(payload) * 3 // 4 > max_bytes + 2:
            raise media_too_large(param, max_bytes)
        return pybase64.b64decode(payload, validate=True), payload
    except UnicodeEncodeError:
        what = "characters that are not ASCII"
    except (binascii.Error, ValueError) as error:
        what = str(error)
    raise media_refused(param, f"invalid base64 ({what})", "invalid_base64")


def base64_bytes(size_bytes: int) -> int:
    """How long a data URL of so many bytes is, at most."""
    return -(-size_bytes // 3) * 4 + MAX_HEAD


def read_local(url: str, *, root: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a regular file under the directory `root`; "": there is none.

    The file is opened first and judged by where the open descriptor really is, so that no symlink swapped in
    between leads out. Every refusal reads the same: it must not tell what exists outside.

    Raises:
        RequestError: no root configured, outside it, not there, or not a regular file. PayloadTooLargeError.
    """
    if not root:
        raise media_refused(param, "this server does not read local files", "local_files_refused")
    refusal = media_refused(param, "not a readable file under the allowed directory", "local_file_refused")
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise refusal
        descriptor = os.open(unquote(parts.path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):  # a NUL in the path is a ValueError
        raise refusal from None
    try:
        where = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not where.is_relative_to(Path(root).resolve()) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise refusal
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise media_too_large(param, max_bytes)
    return data
