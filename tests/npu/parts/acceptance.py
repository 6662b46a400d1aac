"""vllm-ascend's weekly acceptance of EPD: Qwen2.5-VL-7B-Instruct as 1E+1PD, loaded by AISBench.

Some requests to warm up, TextVQA's accuracy (82.05 ± 5), then 512 requests with a 1080p image, 128 at once, answers of
256 tokens at most (its `Qwen2.5-VL-7B-Instruct-EPD`). With MODEL, TEXTVQA and AISBENCH that is what runs here.
Without them nobody can judge accuracy, and a row says so. The load is the same then, by `epd-bench load` with drawn
images, every answer of 256 tokens: of random weights in an 8B model's proportions where MODEL is not given either.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from bench.aisbench.details import DATASET_NAME, NAME, own_figures, results_folder
from bench.aisbench.environment import run_command
from bench.served import LOGS_ENV, Served, served
from tests.npu.parts.eight_b import SLO, figures_of, model_of, stage_flags
from tests.npu.rig import PartFailed, Rig

LAYOUT = "E-PD"
ROOM = 10_000
REQUESTS, AT_ONCE, TOKENS = 512, 128, 256
WARM_UP = ("50", "32", "20")  # requests, at once, tokens
CPU_REQUESTS, CPU_AT_ONCE, CPU_TOKENS, CPU_WARM_UP = 16, 8, 16, ("4", "4", "4")
ACCURACY, WITHIN, ACCURACY_TOKENS = 82.05, 5.0, 2048
LIMIT_S = 400.0


def run(rig: Rig) -> None:
    os.environ[LOGS_ENV] = str(rig.folder / "logs")
    given, at_once = rig.card.given_model, AT_ONCE if rig.card.kind != "cpu" else CPU_AT_ONCE
    batch = f"--max-num-batched-tokens {ROOM} --max-num-seqs {at_once}"
    flags = stage_flags(rig, batch, ROOM, weights=bool(given))
    model = given or str(model_of(rig))
    words = [model, "--device", rig.card.kind, "--share-devices", *flags]
    with rig.layout(LAYOUT), served(LAYOUT, words, traced=False) as launch:
        rig.row("ready_s", round(launch.ready_s, 1))
        if given and rig.card.textvqa and rig.card.aisbench:
            _aisbench(rig, launch, at_once)
        else:
            why = "MODEL, TEXTVQA and AISBENCH are needed for it"
            rig.row("accuracy", "not judged", why=why, client="epd-bench load, drawn images")
            _load(rig, launch, at_once, model)


def _load(rig: Rig, launch: Served, at_once: int, model: str) -> None:
    requests, tokens, warm_up = (
        (CPU_REQUESTS, CPU_TOKENS, CPU_WARM_UP) if rig.card.kind == "cpu" else (REQUESTS, TOKENS, WARM_UP)
    )
    common = ["load", launch.url, "--workload", "textvqa-1080p", "--warm-up", "0", "--min-samples", "2", "--slo", SLO]
    common += ["--tokenizer", model] if Path(model).is_dir() else []  # else a word counts as a token
    n, together, length = warm_up
    words = ("--n", n, "--concurrency", together, "--output-tokens", length, "--seed", "1")
    rig.bench(*common, *words, name="warm-up", limit_s=LIMIT_S)
    words = ("--n", str(requests), "--concurrency", str(at_once), "--output-tokens", str(tokens))
    found = rig.bench(*common, *words, name="load", limit_s=LIMIT_S)
    (row,) = found["rows"]
    rig.row("load", figures_of(row), requests=requests, at_once=at_once, tokens=tokens)
    rig.check(row["ok"] == requests, "every request is answered whole", f"{row['ok']} of {requests}")


def _aisbench(rig: Rig, launch: Served, at_once: int) -> None:
    rows = textvqa_rows(Path(rig.card.textvqa), rig.scratch / "textvqa")
    asked = {"url": launch.url, "model": launch.model, "tokenizer": rig.card.given_model, "batch_size": at_once}
    accuracy = json.loads(
        (_ran(rig, "all", rows, tokens=ACCURACY_TOKENS, **asked) / f"{DATASET_NAME}.json").read_text()
    )
    value = accuracy["accuracy"]
    rig.row("accuracy", value, client="AISBench", asked=f"{ACCURACY} ± {WITHIN}")
    if rig.card.kind == "cpu":
        rig.row("accuracy_judged", "no: a rehearsal")
    else:
        rig.check(abs(value - ACCURACY) <= WITHIN, f"accuracy of TextVQA is {ACCURACY} ± {WITHIN}", str(value))
    requests = REQUESTS if rig.card.kind != "cpu" else CPU_REQUESTS
    own = own_figures(_ran(rig, "perf", rows, requests, tokens=TOKENS, **asked))
    rig.row("load", own, requests=requests, at_once=at_once, tokens=TOKENS, client="AISBench")
    answered = own.get("Success Requests", 0.0)
    rig.check(answered > 0 and not own.get("Failed Requests"), "every request is answered", str(answered))


def textvqa_rows(textvqa: Path, made: Path) -> Path:
    """The questions of the subset in a new folder `made`, with its answers beside them and images as absolute paths.

    Raises:
        PartFailed: a file is missing.
    """
    files = {path.name: path for path in textvqa.rglob("*") if path.is_file()}
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        shutil.copyfile(files["textvqa_val_annotations.json"], made / "textvqa_val_annotations.json")
        lines = [json.loads(line) for line in files["textvqa_val.jsonl"].read_text().splitlines() if line.strip()]
        lines = [{**line, "image": str(files[Path(line["image"]).name].absolute())} for line in lines]
    except KeyError as error:
        raise PartFailed(f"TEXTVQA={textvqa} has no {error.args[0]}") from error
    (rows := made / "textvqa_val.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rows


def _ran(rig: Rig, mode: str, rows: Path, requests: int = 0, **asked: Any) -> Path:
    """The folder of AISBench's results in this mode. Raises PartFailed."""
    folder = rig.folder / f"aisbench-{mode}"
    shutil.rmtree(folder, ignore_errors=True)
    for kind in ("models", "datasets"):
        (folder / kind).mkdir(parents=True)
        (folder / kind / f"{NAME}.py").write_text(config(rows, **asked))
    command = [f"{rig.card.aisbench}/bin/ais_bench", "--config-dir", str(folder), "--models", NAME, "--datasets", NAME]
    command += ["--mode", mode, "--work-dir", "results"]
    code = run_command([*command, *(["--num-prompts", str(requests)] if requests else [])], folder, LIMIT_S)
    results = folder / "results"
    for large in (*results.rglob("*details.jsonl"), *results.rglob("predictions"), *results.rglob("db_data")):
        (shutil.rmtree if large.is_dir() else Path.unlink)(large)  # they hold the images, too
    if mode == "perf":
        return results_folder(results)
    if found := sorted(results.glob(f"*/results/{NAME}")):
        return found[-1]
    raise PartFailed(f"AISBench ended with {code} and no accuracy: see {folder.name}/ais_bench.log")


def config(rows: Path, *, url: str, model: str, tokenizer: str, batch_size: int, tokens: int) -> str:
    """What AISBench reads: its own prompt, template and judge of TextVQA, our model."""
    return f"""from ais_bench.benchmark.datasets import TEXTEvaluator, TEXTVQADataset
from ais_bench.benchmark.models import VLLMCustomAPIChat
from ais_bench.benchmark.openicl.icl_inferencer import GenInferencer
from ais_bench.benchmark.openicl.icl_prompt_template.icl_prompt_template_mm import MMPromptTemplate
from ais_bench.benchmark.openicl.icl_retriever import ZeroRetriever

question = {{"type": "text", "text": "{{question}} Answer the question using a single word or phrase."}}
image = {{"type": "image_url", "image_url": {{"url": "data:image/jpeg;base64,{{image}}"}}}}
template = dict(round=[dict(role="HUMAN", prompt_mm={{"text": question, "image": image}})])
textvqa_datasets = [
    dict(
        abbr={DATASET_NAME!r},
        type=TEXTVQADataset,
        path={str(rows)!r},
        image_type="image_base64",
        reader_cfg=dict(input_columns=["question", "image"], output_column="answer"),
        infer_cfg=dict(
            prompt_template=dict(type=MMPromptTemplate, template=template),
            retriever=dict(type=ZeroRetriever),
            inferencer=dict(type=GenInferencer),
        ),
        eval_cfg=dict(evaluator=dict(type=TEXTEvaluator)),
    )
]
models = [
    dict(
        attr="service",
        type=VLLMCustomAPIChat,
        abbr={NAME!r},
        path={tokenizer!r},
        model={model!r},
        stream=True,
        request_rate=0,
        use_timestamp=False,
        retry=1,
        api_key="",
        url={url!r},
        max_out_len={tokens},
        batch_size={batch_size},
        trust_remote_code=False,
        generation_kwargs=dict(temperature=0.0),
    )
]
"""
