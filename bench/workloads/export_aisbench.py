"""A workload as AISBench's `mm_custom`: rows, pictures as files, and the dataset entry of a configuration.

Read from ais-bench-benchmark 3.1.20260630. Pictures are files with absolute paths and no MIME type of their own: the
template of the dataset entry states one for all. AISBench sends row 0 once more as its warm-up, so row 0 is a
sacrifice: it belongs to no workload, shares no picture with it, and whoever reads the results leaves it out.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.workloads.arrivals import Arrivals, ClosedLoop
from bench.workloads.exported import Exported, milliseconds, rows_to, unwritable
from bench.workloads.pictures import Pictures
from bench.workloads.spec import MIME, PictureFormat, PictureRef, RequestSpec
from epd_serve.errors import ConfigError

DATASET = Path("datasets") / "mm_custom_datasets.py"
"""In the export, which is a `--config-dir` then; `--datasets` finds a variable whose name ends in `_datasets`."""

SACRIFICE = "A request before the first: it warms the server up and is not counted."
SACRIFICE_SEED = 0

INPUT_COLUMNS = ("question", "image", "video", "audio", "max_out_len", "timestamp")
"""Of `reader_cfg`. The first four as in AISBench's own entry; a row's length and time act only when listed here."""


def export_aisbench(
    requests: Iterable[RequestSpec], pictures: Pictures, directory: Path, arrivals: Arrivals | None = None
) -> Exported:
    """Write rows, pictures and the dataset entry.

    Args:
        requests: finite; with arrival times in all or in none.

    Raises:
        ConfigError: nothing to export, or the directory cannot be written.
    """
    directory = directory.absolute()
    formats: Counter[PictureFormat] = Counter()
    count, timed = 0, False
    with rows_to(directory) as (path, write):
        for request in requests:
            if count == 0:
                timed = request.arrival_s is not None
                sacrifice = _sacrifice(request)
                write(_row(sacrifice, _files(sacrifice, pictures, directory)))
            write(_row(request, _files(request, pictures, directory)))
            formats.update(picture.format for picture in request.pictures)
            count += 1
        if count == 0:
            raise ConfigError("nothing to export: the workload is empty", param="--n")
    common = formats.most_common(1)[0][0] if formats else "jpeg"
    entry = directory / DATASET
    try:
        entry.parent.mkdir(exist_ok=True)
        entry.write_text(dataset_entry(path, MIME[common], timed=timed), encoding="utf-8")
    except OSError as error:
        raise unwritable(directory, error) from error
    notes = [f"row 0 of {count + 1} is the warm-up's: leave it out of results"]
    if len(formats) > 1:
        notes.append(
            f"AISBench states one type for all pictures: {formats.total() - formats[common]} of {formats.total()} are "
            f"sent as {MIME[common]} and are not; servers go by the bytes"
        )
    if timed:
        notes.append("the model entry needs use_timestamp=True")
    elif isinstance(arrivals, ClosedLoop):
        notes.append(f"closed loop: the model entry needs request_rate=0, batch_size={arrivals.concurrency}")
    words = (
        f"ais_bench --config-dir {directory} --models NAME --datasets {entry.stem} -m perf --num-prompts {count + 1}"
    )
    return Exported(count, (path, entry), words, (f"put your model entry in {directory}/models/NAME.py", *notes))


def dataset_entry(rows: Path, mime: str, *, timed: bool) -> str:
    """The Python text that AISBench reads: `mm_custom_datasets` with one entry.

    Args:
        rows: absolute.
        mime: of all pictures. timed: the rows have timestamps.
    """
    url = f"data:{mime};base64,{{image}}"
    columns = [name for name in INPUT_COLUMNS if timed or name != "timestamp"]
    return f"""from ais_bench.benchmark.datasets import MMCustomDataset, MMCustomEvaluator
from ais_bench.benchmark.openicl.icl_inferencer import GenInferencer
from ais_bench.benchmark.openicl.icl_prompt_template.icl_prompt_template_mm import MMPromptTemplate
from ais_bench.benchmark.openicl.icl_retriever import ZeroRetriever

mm_custom_datasets = [
    dict(
        abbr="mm_custom",
        type=MMCustomDataset,
        path={str(rows)!r},
        mm_type="base64",
        reader_cfg=dict(input_columns={columns!r}, output_column="answer"),
        infer_cfg=dict(
            prompt_template=dict(
                type=MMPromptTemplate,
                template=dict(
                    round=[
                        dict(
                            role="HUMAN",
                            prompt_mm={{
                                "text": {{"type": "text", "text": "{{question}}"}},
                                "image": {{"type": "image_url", "image_url": {{"url": {url!r}}}}},
                            }},
                        )
                    ]
                ),
            ),
            retriever=dict(type=ZeroRetriever),
            inferencer=dict(type=GenInferencer),
        ),
        eval_cfg=dict(evaluator=dict(type=MMCustomEvaluator)),
    )
]
"""


def _row(request: RequestSpec, files: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "type": "image",
        "path": files,
        "question": request.text,
        "answer": "",
        "max_out_len": request.max_tokens,
    }
    if request.arrival_s is not None:
        row["timestamp"] = milliseconds(request.arrival_s)
    return row


def _sacrifice(first: RequestSpec) -> RequestSpec:
    """Like the first request, but with pictures that no workload has."""
    own = tuple(
        PictureRef(picture.width, picture.height, "jpeg", seed=SACRIFICE_SEED + place)
        for place, picture in enumerate(first.pictures)
    )
    arrival_s = None if first.arrival_s is None else 0.0
    return replace(first, id="warm-up", text=SACRIFICE, pictures=own, arrival_s=arrival_s)


def _files(request: RequestSpec, pictures: Pictures, directory: Path) -> list[str]:
    """Paths of the request's pictures: the user's own, or files in the export."""
    return [
        str(picture.path if picture.path is not None else _copied(pictures.file(picture), directory / "pictures"))
        for picture in request.pictures
    ]


def _copied(source: Path, folder: Path) -> Path:
    """The export outlives the cache; on one file system a link costs no space."""
    target = folder / source.name
    if target.is_file() and target.stat().st_size == source.stat().st_size:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target
