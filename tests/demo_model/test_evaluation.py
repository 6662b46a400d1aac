"""The evaluation over HTTP, against a server whose answers are known, and the card that is made of its results."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from epd_serve.demo.presets import builtin_model_dir
from epd_serve.errors import StageError
from tests.demo_model import __main__ as command
from tests.demo_model import evaluation
from tests.demo_model.card import NAME, parameters, write
from tests.demo_model.evaluation import AnsweredQuestion, accuracy, ask_all
from tests.demo_model.examination import TASKS, Question, examination
from tests.demo_model.results import Result, interval

QUESTIONS = examination(2, command.EVALUATION_SEED)


class Known:
    """An endpoint that answers every question rightly but those of `wrong`, or fails with `status`."""

    def __init__(self) -> None:
        self.right = {
            self.key(it.turns[: turn + 1]): it.turns[turn].answer for it in QUESTIONS for turn in range(len(it.turns))
        }
        self.wrong: set[str] = set()
        self.status = 200
        self.asked: list[dict[str, Any]] = []

    @staticmethod
    def key(turns: Any) -> str:
        return json.dumps([[turn.question, [scene.size for scene in turn.scenes]] for turn in turns])

    def answer(self, body: dict[str, Any]) -> str:
        self.asked.append(body)
        turns = []
        for message in body["messages"]:
            if message["role"] == "user":
                sizes, text = [], ""
                for part in message["content"]:
                    if part["type"] == "image_url":
                        data = base64.b64decode(part["image_url"]["url"].split(",")[1])
                        sizes.append(list(Image.open(io.BytesIO(data)).size))
                    else:
                        text = part["text"]
                turns.append([text, sizes])
        right = self.right[json.dumps(turns)]
        return "no idea" if turns[-1][0] in self.wrong else f" {right}\n"


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
def url(known: Known) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "epd-demo"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            said = known.answer(body)
            self.reply(known.status, {"choices": [{"message": {"content": said}}]})

        def reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def of(*tasks: str) -> list[Question]:
    return [it for it in QUESTIONS if it.task in tasks]


def test_right_answers_count_exactly(url: str, known: Known) -> None:
    items = of("count", "second turn", "no picture")
    known.wrong = {items[0].turns[-1].question}
    numbers: list[int] = []

    answers = ask_all(url, items, at_once=3, tell=numbers.append)

    assert [it.question for it in answers] == [it.turns[-1].question for it in items]
    assert numbers == [1, 2, 3, 4, 5, 6]
    wrong = [it for it in answers if not it.right]
    assert {it.question for it in wrong} == known.wrong and all(it.answer == "no idea" for it in wrong)
    assert accuracy(answers)["second turn"] == accuracy(answers)["no picture"] == 1.0


def test_a_second_turn_sees_the_first_answer_and_everything_is_greedy(url: str, known: Known) -> None:
    ask_all(url, of("second turn")[:1], at_once=1, tell=lambda _: None)

    first, second = known.asked
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"].strip() == of("second turn")[0].turns[0].answer
    assert first["temperature"] == second["temperature"] == 0


def test_an_endpoint_that_fails_ends_the_evaluation(url: str, known: Known) -> None:
    known.status = 500

    with pytest.raises(StageError, match="answers 500"):
        ask_all(url, of("small talk"), at_once=2, tell=lambda _: None)


def test_an_endpoint_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["evaluate", "--url", "http://127.0.0.1:1", "--served-as", "TP1", "--json", str(tmp_path / "r.json")]

    assert command.main(words) == 1
    assert "http://127.0.0.1:1/v1/models names no model" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


FOREIGN = tuple(
    AnsweredQuestion(f"canvas, {count}", "What is in the picture?", "nothing", answer, ((64, 64),))
    for count in ("one", "two", "three")
    for answer in ("nothing", "nothing" if count == "one" else "a red circle")
)


def foreign_result(folder: Path) -> Path:
    path = folder / "foreign.json"
    evaluation.write(path, FOREIGN, {"served_as": "TP1", "per_task": 2, "seed": 2026})
    return path


def evaluated(url: str, path: Path, served_as: str) -> Path:
    words = ["evaluate", "--url", url, "--served-as", served_as, "--json", str(path), "--number", "1"]
    assert command.main([*words, "--task", "count", "--task", "small talk"]) == 0
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(builtin_model_dir() / "model.safetensors")
    plan = {"seed": 8, "vision_steps": 10, "vision_pictures": 32, "dialogue_steps": 20, "randomised": 0.6}
    (folder / "training.json").write_text(json.dumps({"plan": plan, "cpu_s": 120.0}))
    return folder


def test_the_card_is_made_of_the_results(url: str, model: Path, tmp_path: Path, known: Known) -> None:
    known.wrong = {it.turns[-1].question for it in of("count")}
    results = [evaluated(url, tmp_path / f"{name}.json", name) for name in ("TP1", "(E-P)-D")]

    assert command.main(["card", str(model), *map(str, results), "--foreign", str(foreign_result(tmp_path))]) == 0

    text = (model / NAME).read_text()
    assert "| task | for example | TP1 | (E-P)-D |" in text
    assert "| count | How many shapes are there? | 0.0 % | 0.0 % | 0.0 to 79.3 % | 100.0 % |" in text
    assert "| small talk | Hello; Who are you?; Thanks | 100.0 % | 100.0 % | 20.7 to 100.0 % | 100.0 % |" in text
    assert "Below what was asked of it: count 0.0 % of 97%." in text
    assert "TP1 and (E-P)-D gave the same answer to 2 of 2." in text
    weights = (model / "model.safetensors").read_bytes()
    assert f"{parameters(weights) / 1e6:.1f} million parameters" in text
    assert hashlib.sha256(weights).hexdigest() in text
    assert "(320 pictures)" in text and "2 CPU minutes" in text
    assert "Of 60% of them only the order" in text
    assert "| 100.0 % | 50.0 % | 50.0 % | 2 |" in text and "| pil" not in text
    assert "| mean | 100.0 % | 50.0 % | 50.0 % | |" in text


def test_the_card_tells_every_training_that_led_to_the_weights(url: str, model: Path, tmp_path: Path) -> None:
    about = json.loads((model / "training.json").read_text())
    then = {"seed": 9, "begun_from": "5eed", "vision_steps": 0, "vision_pictures": 32, "dialogue_steps": 70}
    then |= {"randomised": 0.75, "turns": 12}
    (model / "training.json").write_text(json.dumps({"plan": then, "cpu_s": 600.0, "before": about}))

    words = ["card", str(model), str(evaluated(url, tmp_path / "r.json", "TP1"))]
    assert command.main([*words, "--foreign", str(foreign_result(tmp_path))]) == 0

    text = (model / NAME).read_text()
    first, second = text.index("- Training: seed 8, 10 steps of the vision"), text.index("- Went on from those weights")
    assert first < second and "SHA-256 `5eed`): seed 9, 70 steps of questions and answers; 10 CPU minutes." in text
    assert "conversations of up to 4 turns" in text and "conversations of up to 12 turns" in text
    assert "train --out DIR --from MODEL" in text


def test_answers_that_differ_between_two_ways_of_serving_are_counted(
    url: str, model: Path, tmp_path: Path, known: Known
) -> None:
    one = evaluated(url, tmp_path / "one.json", "TP1")
    known.wrong = {it.turns[-1].question for it in of("count")}
    other = evaluated(url, tmp_path / "other.json", "(E-P)-D")

    words = ["card", str(model), str(one), str(other), "--foreign", str(foreign_result(tmp_path))]
    assert command.main(words) == 0
    text = (model / NAME).read_text()
    assert "| 100.0 % | 0.0 % |" in text
    assert "TP1 and (E-P)-D gave the same answer to 1 of 2." in text


def test_results_about_other_questions_make_no_card(
    url: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = evaluated(url, tmp_path / "one.json", "TP1")
    other = tmp_path / "other.json"
    words = ["evaluate", "--url", url, "--served-as", "(E-P)-D", "--json", str(other), "--number", "2"]
    assert command.main([*words, "--task", "count", "--task", "small talk"]) == 0

    words = ["card", str(model), str(one), str(other), "--foreign", str(foreign_result(tmp_path))]
    assert command.main(words) == 2
    assert "(E-P)-D was asked other questions than TP1" in capsys.readouterr().err
    assert not (model / NAME).exists()


def answered(task: str, right: bool, *sizes: tuple[int, int], question: str = "what?") -> AnsweredQuestion:
    return AnsweredQuestion(task, question, "yes", "yes" if right else "no", sizes)


def test_the_card_counts_by_size_and_by_number_of_pictures(model: Path) -> None:
    answers = (
        *(answered("describe", right, (64, 128)) for right in (True, True, False, False)),
        answered("describe", True, (3840, 2160)),
        answered("describe", False, (65, 3839)),
        answered("each", True, (64, 64), (64, 64)),
        answered("each", False, (64, 64), (64, 64), (64, 64)),
        answered("second turn", False, (64, 64)),
        answered("no picture", True, question="one"),
        answered("no picture", True, question="two"),
        answered("no picture", True, question="two"),
    )
    write(model, [Result("TP1", 1, 2026, answers)], [Result("TP1", 1, 2026, FOREIGN)])

    text = (model / NAME).read_text()

    assert (
        "Questions about one picture: 64 pixels on the shorter side 50.0 % (of 4), 3840 pixels or more on the longer "
        "100.0 % (of 1), all others 0.0 % (of 1)." in text
    )
    assert "Questions about several: two 100.0 % (of 1), three 0.0 % (of 1)." in text
    assert "Some questions repeat, and count once for the interval: no picture has 2 different ones." in text
    assert "gave the same answer" not in text


def test_the_interval_is_wilson_s() -> None:
    low, high = interval([answered("describe", number < 495, (64, 64)) for number in range(500)])

    assert (round(low, 4), round(high, 4)) == (0.9768, 0.9957)


OTHERS = ["--foreign", "result.json"]
EVALUATE = ["evaluate", "--url", "http://127.0.0.1:1", "--served-as", "x"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*EVALUATE, "--json", "r.json", "--task", "dance"], "--task: unknown task 'dance'"),
        ([*EVALUATE, "--json", "r.json", "--foreign", "--task", "count"], "--task: unknown task 'count'"),
        ([*EVALUATE, "--json", "."], "--json: . is a folder"),
        ([*EVALUATE, "--json", "file/r.json"], "--json: cannot write into file"),
        (["train", "--quick", "--out", "file"], "--out: cannot write into file"),
        (["train", "--quick", "--out", "x", "--from", "y"], "--from: y is no model folder that train or export wrote"),
        (["look", "--out", "/nonexistent"], "--out: /nonexistent has no checkpoint: train first"),
        (["card", "x", "/nonexistent.json", *OTHERS], "RESULT: /nonexistent.json is no result of evaluate"),
        (["card", "nothing", "result.json", *OTHERS], "MODEL: nothing is no model folder"),
        (["card", ".", "result.json", *OTHERS], "MODEL: . is no model folder"),
    ],
)
def test_bad_input_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("training.json").write_text("{}")
    Path("model.safetensors").write_bytes(b"no weights")
    Path("result.json").write_text(
        json.dumps({"about": {"served_as": "x", "per_task": 1, "seed": 1}, "answers": [], "accuracy": {}})
    )

    assert command.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*EVALUATE, "--json", "r.json", "--number", "0"], "argument --number: '0' is no whole number of 1 or more"),
        ([*EVALUATE, "--json", "r.json", "--at-once", "x"], "argument --at-once: 'x' is no whole number of 1 or more"),
        (["look", "--out", "x", "--number", "-3"], "argument --number: '-3' is no whole number of 1 or more"),
        (["train", "--out", "x", "--seed", "-1"], "argument --seed: '-1' is no whole number of 0 or more"),
    ],
)
def test_numbers_that_cannot_be_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


HEAD = '{"about": {"served_as": "x", "per_task": 1, "seed": 1}, "answers": ['
ANSWER = '{"task": "count", "question": "?", "expected": "one", "answer": "one", "sizes": [[64, 64]]}'


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"about": [], "answers": []}',
        HEAD + "{}]}",
        HEAD + ANSWER.replace("count", "dance") + "]}",
        HEAD + ANSWER.replace("[[64, 64]]", "[]") + "]}",
        HEAD + ANSWER.replace('"answer": "one"', '"answer": null') + "]}",
    ],
)
def test_a_file_that_is_no_result_is_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text(content)

    assert command.main(["card", str(tmp_path), str(tmp_path / "r.json"), "--foreign", "other.json"]) == 2
    assert "r.json is no result of evaluate" in capsys.readouterr().err


def test_a_url_that_is_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["evaluate", "--url", "http://[::1", "--served-as", "x", "--json", str(tmp_path / "r.json")]

    assert command.main(words) == 1
    assert "http://[::1/v1/models names no model" in capsys.readouterr().err


def test_the_card_that_ships_is_about_the_weights_that_ship() -> None:
    weights = (builtin_model_dir() / "model.safetensors").read_bytes()

    assert len(weights) <= 8_000_000
    assert hashlib.sha256(weights).hexdigest() in (builtin_model_dir() / NAME).read_text()


def test_every_task_has_an_example_on_the_card() -> None:
    from tests.demo_model.card import _ABOUT

    assert set(_ABOUT) == set(TASKS)


@pytest.mark.slow
def test_the_whole_path_from_training_to_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"

    assert command.main(["train", "--out", str(out), "--quick"]) == 0
    assert command.main(["export", "--out", str(out), "--model", str(tmp_path / "copy")]) == 0
    assert command.main(["look", "--out", str(out), "--number", "1"]) == 0

    assert "after 5 of 5 steps" in capsys.readouterr().out
    files = {path.name for path in (out / "model").iterdir()}
    assert files >= {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "training.json"}
    digests = [(folder / "model.safetensors").read_bytes() for folder in (out / "model", tmp_path / "copy")]
    assert digests[0] == digests[1] and len(digests[0]) < 8_000_000
