"""The model folders that `epd_serve.demo.presets` writes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import jinja2
import pytest

from epd_serve.demo.families import family_names, read_family, write_family
from epd_serve.demo.presets import PRESETS, RandomPreset, builtin_model_dir, write_preset
from epd_serve.errors import ConfigError
from epd_serve.model_weights import read_model_weights

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="drawing random weights needs torch and transformers"
)
NEEDED_FILES = {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json", "chat_template.jinja"}


def tensor_shapes(model: Path) -> dict[str, list[int]]:
    """Names and shapes from the header of `model.safetensors`."""
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def without_layer_numbers(names: Iterable[str]) -> set[str]:
    return {re.sub(r"\d+", "N", name) for name in names}


def digest(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def test_the_built_in_model_is_complete():
    assert {path.name for path in builtin_model_dir().iterdir()} >= NEEDED_FILES


def test_the_demo_preset_is_a_copy_of_the_built_in_model(tmp_path):
    write_preset(tmp_path / "deep" / "demo", "demo")

    assert digest(tmp_path / "deep" / "demo") == digest(builtin_model_dir())


def test_an_unknown_preset_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="'tinny': did you mean 'tiny'"):
        write_preset(tmp_path / "model", "tinny")
    assert not (tmp_path / "model").exists()


def test_a_directory_in_use_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")

    with pytest.raises(ConfigError, match="not an empty directory"):
        write_preset(tmp_path, "demo")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_an_empty_directory_may_be_filled(tmp_path):
    write_preset(tmp_path, "demo")

    assert {path.name for path in tmp_path.iterdir()} >= NEEDED_FILES


def test_a_file_in_the_way_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError):
        write_preset(tmp_path / "file" / "model", "demo")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The random presets, written once: each takes a process that imports torch."""
    folder = tmp_path_factory.mktemp("presets")
    for preset in ("tiny", "bench", "npu"):
        write_preset(folder / preset, preset)
    return {preset: folder / preset for preset in ("tiny", "bench", "npu")}


@pytest.mark.slow
@needs_transformers
def test_weights_are_fixed_by_the_seed(generated, tmp_path):
    write_preset(tmp_path / "same", "tiny", seed=0)
    write_preset(tmp_path / "other", "tiny", seed=1)

    assert digest(generated["tiny"]) == digest(tmp_path / "same") != digest(tmp_path / "other")


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(("preset", "millions"), [("tiny", 7.1), ("bench", 41.7), ("npu", 11.3)])
def test_a_random_preset_has_its_size_and_the_demo_models_parameter_names(generated, preset, millions):
    shapes = tensor_shapes(generated[preset])
    count = sum(math.prod(shape) for shape in shapes.values())

    assert round(count / 1e6, 1) == millions
    assert without_layer_numbers(shapes) == without_layer_numbers(tensor_shapes(builtin_model_dir()))


@needs_transformers
def test_the_shape_of_an_8b_model_takes_no_disk_and_tells_the_sizes_of_its_weights(tmp_path):
    write_preset(tmp_path / "model", "8b")
    about = (tmp_path / "model" / "model.safetensors").stat()
    weights = read_model_weights(tmp_path / "model", element_bytes=2)

    assert about.st_size > 15e9 and about.st_blocks * 512 < 1 << 20
    assert weights is not None
    assert (round(weights.language / 2e9, 2), round(weights.tower / 2e9, 2)) == (6.95, 0.58)
    assert without_layer_numbers(tensor_shapes(tmp_path / "model")) == without_layer_numbers(
        tensor_shapes(builtin_model_dir())
    )


@needs_transformers
def test_a_model_may_have_sizes_of_the_caller_s_own(tmp_path):
    sizes = RandomPreset(text={"hidden_size": 64}, vision={"out_hidden_size": 64}, max_pixels=65_536, hollow=True)
    write_preset(tmp_path / "model", sizes)
    shapes = tensor_shapes(tmp_path / "model")

    assert {shape[-1] for name, shape in shapes.items() if name.endswith("embed_tokens.weight")} == {64}
    assert json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())["size"]["longest_edge"] == 65_536


@pytest.mark.slow
@needs_transformers
def test_a_random_preset_bounds_its_pictures(generated):
    """An encoder's start-up runs the largest possible picture: unbounded, it hangs for minutes on CPU."""
    size = json.loads((generated["bench"] / "preprocessor_config.json").read_text())["size"]

    assert size == {"longest_edge": 1_048_576, "shortest_edge": 65_536}


def test_naming_presets_imports_no_torch():
    script = "import sys, epd_serve.demo.presets; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2]).returncode == 0
    assert PRESETS[:5] == ("demo", "tiny", "bench", "npu", "8b")
    assert set(PRESETS[5:]) == set(family_names())


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("preset", PRESETS[5:])
def test_a_preset_of_another_architecture_is_tiny_complete_and_of_one_vocabulary(preset, tmp_path):
    write_preset(tmp_path / "model", preset)

    shapes = tensor_shapes(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert {path.name for path in (tmp_path / "model").iterdir()} >= NEEDED_FILES
    assert sum(math.prod(shape) for shape in shapes.values()) < 10e6
    text = config.get("thinker_config", config)["text_config"]
    assert text["vocab_size"] == len(ids) == len(set(ids.values()))
    assert text["eos_token_id"] == ids["<|im_end|>"]


@pytest.mark.parametrize("preset", PRESETS[5:])
def test_a_preset_of_another_architecture_shows_every_item_to_the_model(preset, tmp_path):
    """The template is what puts an item's placeholder into the prompt; one without it is a 500 in vLLM."""
    shutil.copytree(builtin_model_dir(), tmp_path, dirs_exist_ok=True)
    write_family(tmp_path, preset)

    template = jinja2.Environment().from_string((tmp_path / "chat_template.jinja").read_text())
    for modality, placeholder in read_family(preset)["placeholders"].items():
        content = [{"type": modality}, {"type": "text", "text": "What?"}]
        prompt = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
        assert prompt == f"<|im_start|>user\n{placeholder}What?<|im_end|>\n<|im_start|>assistant\n"
