"""A workload as AISBench's `mm_custom`: rows, images as files, and the dataset entry of a configuration.

Read from ais-bench-benchmark 3.1.20260630. Images are files with absolute paths and no MIME type of their own: the
template of the dataset entry states one for all. AISBench sends row 0 once more as its warm-up, so row 0 is a
sacrifice: it belongs to no workload, shares no image with it, and whoever reads the results leaves it out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.workloads.exports import Exported, unwritable, write_rows
from bench.workloads.images import Images
from bench.workloads.requests import Arrivals, ClosedLoop, ImageRef, RequestSpec

DATASET = Path("datasets") / "mm_custom_datasets.py"
"""In the export, which is a `--config-dir` then; `--datasets` finds a variable whose name ends in `_datasets`."""

SACRIFICE = "A request before the first: it warms the server up and is not counted."
SACRIFICE_SEED = 0

INPUT_COLUMNS = ("question", "image", "video", "audio", "max_out_len", "timestamp")
"""Of `reader_cfg`. The first four as in AISBench's own entry; a row's length and time act only when listed here."""


def export_aisbench(
    requests: Sequence[RequestSpec], images: Images, directory: Path, arrivals: Arrivals | None = None
) -> Exported:
    """Write rows, images and the dataset entry.

    Args:
        requests: with arrival times in all or in none.

    Raises:
        ConfigError: nothing to export, or the directory cannot be written.
    """
    directory = directory.absolute()
    rows = [_sacrifice(requests[0]), *requests] if requests else []
    path = write_rows(directory, (_row(one, images, directory) for one in rows))
    timed = requests[0].arrival_s is not None
    entry = directory / DATASET
    try:
        entry.parent.mkdir(exist_ok=True)
        entry.write_text(dataset_entry(path, timed=timed), encoding="utf-8")
    except OSError as error:
        raise unwritable(directory, error) from error
    notes = [f"put your model entry in {directory}/models/NAME.py"]
    notes.append(f"row 0 of {len(rows)} is the warm-up's: leave it out of results")
    if timed:
        notes.append("the model entry needs use_timestamp=True")
    elif isinstance(arrivals, ClosedLoop):
        notes.append(f"closed loop: the model entry needs request_rate=0, batch_size={arrivals.concurrency}")
    command = f"ais_bench --config-dir {directory} --models NAME --datasets {entry.stem} -m perf"
    return Exported(len(requests), (path, entry), f"{command} --num-prompts {len(rows)}", tuple(notes))


def dataset_entry(rows: Path, *, timed: bool) -> str:
    """The Python text that AISBench reads: `mm_custom_datasets` with one entry.

    Args:
        rows: absolute.
        timed: the rows have timestamps.
    """
    url = "data:image/jpeg;base64,{image}"
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


def _row(request: RequestSpec, images: Images, directory: Path) -> dict[str, Any]:
    """A row whose images are files in the export."""
    folder = directory / "pictures"
    paths = [str(_copied(images.file(one), folder)) for one in request.images]
    row = {"type": "image", "path": paths, "question": request.text, "answer": "", "max_out_len": request.max_tokens}
    return row if request.arrival_s is None else {**row, "timestamp": round(request.arrival_s * 1000)}


def _sacrifice(first: RequestSpec) -> RequestSpec:
    """Like the first request, but with images that no workload has."""
    own = tuple(ImageRef(image.width, image.height, SACRIFICE_SEED + place) for place, image in enumerate(first.images))
    return replace(first, id="warm-up", text=SACRIFICE, images=own, arrival_s=first.arrival_s and 0.0)


def _copied(source: Path, folder: Path) -> Path:
    """The export outlives the cache; on one file system a link costs no space."""
    target = folder / source.name
    if not target.is_file() or target.stat().st_size != source.stat().st_size:
        folder.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
    return target
