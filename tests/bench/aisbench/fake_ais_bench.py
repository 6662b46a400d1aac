"""Stands in for AISBench's command: the same flags, configurations, requests, files and exit code 0 whatever happens.

It reads our configurations as the real one does (Python with AISBench's classes, the same names of fields),
sends row 0 first and then every row, and writes what it saw. The model's name may have a word that makes it misbehave:
`hang` (it stops after two rows) or `nothing` (it dies before the first).
"""

from __future__ import annotations

import http.client
import io
import json
import signal
import sqlite3
import sys
import time
import types
from argparse import ArgumentParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

MODEL_FIELDS = set(
    "attr type abbr path model stream request_rate use_timestamp traffic_cfg retry api_key url max_out_len batch_size "
    "trust_remote_code generation_kwargs".split()
)
AIOHTTPS = {
    "IncompleteRead": "ClientPayloadError",
    "RemoteDisconnected": "ServerDisconnectedError",
    "ConnectionRefusedError": "ClientConnectorError",
    "ConnectionResetError": "ClientOSError",
}
"""What the real client calls these."""
CLASSES = {
    "ais_bench.benchmark.models": "VLLMCustomAPIChat",
    "ais_bench.benchmark.datasets": "MMCustomDataset MMCustomEvaluator",
    "ais_bench.benchmark.openicl.icl_inferencer": "GenInferencer",
    "ais_bench.benchmark.openicl.icl_prompt_template.icl_prompt_template_mm": "MMPromptTemplate",
    "ais_bench.benchmark.openicl.icl_retriever": "ZeroRetriever",
}


def configuration(path: Path) -> dict[str, Any]:
    """The variables of a configuration; its classes are their names."""
    for module, names in CLASSES.items():
        made = types.ModuleType(module)
        for name in names.split():
            setattr(made, name, name)
        sys.modules[module] = made
        for parent in (module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)):
            sys.modules.setdefault(parent, types.ModuleType(parent))
    found: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), found)
    return found


def sent(model: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A request, and what AISBench keeps of it."""
    where = urlsplit(model["url"])
    body = {
        "stream": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": row["question"]}]}],
        "stream_options": {"include_usage": True},
        **model["generation_kwargs"],
        "max_tokens": row["max_out_len"],
        "model": model["model"],
    }
    kept: dict[str, Any] = {"success": False, "error_info": "", "input_tokens": 0, "output_tokens": 0}
    times = [time.perf_counter()]
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return {**kept, "error_info": response.reason, "times": times}
        while line := response.readline():
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                break
            if data:
                times.append(time.perf_counter())
                usage = json.loads(data).get("usage") or {}
                kept["input_tokens"] = usage.get("prompt_tokens", kept["input_tokens"])
                kept["output_tokens"] = usage.get("completion_tokens", kept["output_tokens"])
        return {**kept, "success": True, "times": times}
    except (OSError, ValueError, http.client.HTTPException) as error:
        name = AIOHTTPS.get(type(error).__name__, type(error).__name__)
        return {**kept, "error_info": f"After 1 retries, request failed with exception: {name}: {error}", "times": []}
    finally:
        connection.close()


def write(folder: Path, done: list[dict[str, Any]]) -> None:
    (folder / "db_data").mkdir(parents=True)
    database = sqlite3.connect(folder / "db_data" / "1.db")
    database.execute("CREATE TABLE numpy_store (id INTEGER PRIMARY KEY AUTOINCREMENT, arr_blob BLOB NOT NULL)")
    lines = []
    for row, one in enumerate(done):
        blob = io.BytesIO()
        np.save(blob, np.array(one.pop("times"), dtype=np.float64), allow_pickle=False)
        number = database.execute("INSERT INTO numpy_store (arr_blob) VALUES (?)", (blob.getvalue(),)).lastrowid
        line = {"data_abbr": "mm_custom", "id": row, **one, "time_points": {"__db_ref__": number}, "uuid": f"u{row}"}
        lines.append(json.dumps({**line, "input": [{"role": "user", "content": []}], "db_name": "1.db"}))
    database.commit()
    database.close()
    (folder / "mm_custom_details.jsonl").write_text("\n".join(lines) + "\n")
    if any(one["success"] for one in done):
        columns = "Average,Min,Max,Median,P75,P90,P99"
        rows = [f"{name},total,{','.join(['5.5 ms'] * 7)},{len(done)}" for name in ("E2EL", "TTFT", "TPOT", "ITL")]
        (folder / "mm_custom.csv").write_text("\n".join([f"Performance Parameters,Stage,{columns},N", *rows]) + "\n")
        totals = {"Total Requests": {"total": len(done)}, "Request Throughput": {"total": "5.5 req/s"}}
        (folder / "mm_custom.json").write_text(json.dumps(totals))


def main() -> None:
    parser = ArgumentParser()
    for flag in ("--config-dir", "--models", "--datasets", "--mode", "--num-prompts", "--work-dir"):
        parser.add_argument(flag, required=True)
    asked = parser.parse_args()
    (model,) = configuration(Path(asked.config_dir) / "models" / f"{asked.models}.py")["models"]
    assert set(model) == MODEL_FIELDS and model["retry"] == 1 and asked.mode == "perf"
    (dataset,) = configuration(Path(asked.config_dir) / "datasets" / f"{asked.datasets}.py")["mm_custom_datasets"]
    run = Path(asked.work_dir) / "20260101_000000"
    log = run / "logs" / "infer" / model["abbr"] / "mm_custom.out"
    log.parent.mkdir(parents=True)
    if "nothing" in model["model"]:
        log.write_text(
            "x.AISBenchRuntimeError: [\x1b[1mTINFER-PARAM-005\x1b[0m]. memory usage too high | Visit https://x\n"
        )
        return
    rows = [json.loads(line) for line in Path(dataset["path"]).read_text().splitlines()][: int(asked.num_prompts)]
    done: list[dict[str, Any]] = []
    try:
        if not sent(model, rows[0])["success"]:
            log.write_text("x.AISBenchRuntimeError: Exit task because all warmup requests failed\n")
            return
        begun = time.perf_counter()
        for row in rows:
            if "hang" in model["model"] and len(done) == 2:
                (run / "hangs").touch()
                time.sleep(600)
            if model["use_timestamp"]:
                time.sleep(max(0.0, begun + row["timestamp"] / 1000 - time.perf_counter()))
            done.append(sent(model, row))
    except KeyboardInterrupt:
        pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write(run / "performances" / model["abbr"], done)


if __name__ == "__main__":
    main()
