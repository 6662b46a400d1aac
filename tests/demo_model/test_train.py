"""Training runs: the same plan gives the same weights, however often the run was interrupted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from epd_serve.errors import ConfigError, EpdError  # noqa: E402
from tests.demo_model import batches, checkpoints, muon, train, wordings  # noqa: E402
from tests.demo_model.architecture import TRAINING, Architecture  # noqa: E402
from tests.demo_model.export import export, weights_digest  # noqa: E402
from tests.demo_model.plan import QUICK, Plan  # noqa: E402
from tests.demo_model.raster import rasterize  # noqa: E402
from tests.demo_model.scenes import held_out  # noqa: E402
from tests.demo_model.train import Training, kept_plan  # noqa: E402

SMALL = Architecture(hidden=64, intermediate=64, text_layers=2, vision_layers=2, vision_heads=1)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(training: Training) -> dict[str, Any]:
    return training.network.state_dict()


def test_a_run_interrupted_in_either_stage_ends_with_the_weights_of_one_that_was_not(tmp_path):
    whole = Training(QUICK, tmp_path / "whole", SMALL)
    assert [it.step for it in whole.run()] == [1, 2, 3, 4, 5]
    for until in (1, 3, None):
        part = Training(QUICK, tmp_path / "parts", SMALL)
        for _ in part.run(until=until):
            pass
        part.save()

    assert part.step == whole.step == QUICK.steps
    assert all(torch.equal(it, weights(whole)[name]) for name, it in weights(part).items())
    assert part.cpu_s > 0


def test_two_processes_give_the_weights_of_one(tmp_path):
    alone, shared = (Training(QUICK, tmp_path / name, SMALL) for name in ("alone", "shared"))
    told = [dataclasses.replace(it, cpu_s=0) for it in alone.run()]
    with shared.second() as second:
        assert [dataclasses.replace(it, cpu_s=0) for it in shared.run(second=second)] == told

    assert all(torch.equal(it, weights(alone)[name]) for name, it in weights(shared).items())
    assert shared.cpu_s > second.cpu_s > 0


def test_a_second_process_that_was_killed_ends_the_training(tmp_path):
    training = Training(QUICK, tmp_path, SMALL)
    with training.second() as second:
        second._process.kill()
        with pytest.raises(EpdError, match="second process"):
            list(training.run(second=second))


def test_a_training_goes_on_from_the_weights_of_a_model_and_keeps_what_is_known_of_them(tmp_path):
    first = Training(QUICK, tmp_path / "first", SMALL)
    export(first.network, first.encoder, tmp_path / "model", {"cpu_s": 7}, sizes=SMALL)
    plan = dataclasses.replace(QUICK, begun_from=weights_digest(tmp_path / "model"))

    then = Training(plan, tmp_path / "then", SMALL, begin=tmp_path / "model")
    assert all(torch.equal(it, weights(first)[name].to(torch.bfloat16).float()) for name, it in weights(then).items())
    for _ in then.run(until=1):
        pass
    then.save()
    again = Training(plan, tmp_path / "then", SMALL, begin=tmp_path / "model")
    assert again.before == {"cpu_s": 7} and again.step == 1
    assert all(torch.equal(it, weights(then)[name]) for name, it in weights(again).items())

    with pytest.raises(ConfigError, match="begun with begun_from"):
        Training(QUICK, tmp_path / "then", SMALL)


def test_a_folder_that_is_no_model_is_not_gone_on_from(tmp_path):
    with pytest.raises(ConfigError, match="is no model folder"):
        weights_digest(tmp_path)
    with pytest.raises(ConfigError, match="is no model folder"):
        Training(QUICK, tmp_path, SMALL, begin=tmp_path)


def test_muon_makes_updates_orthogonal():
    for shape in ((3, 20, 60), (2, 60, 20)):
        singular = torch.linalg.svdvals(muon.orthogonal(torch.randn(shape)))
        assert singular.min() > 0.6 and singular.max() < 1.3


def test_a_run_that_is_asked_to_stop_ends_after_a_whole_step_and_goes_on_from_there(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "Training", functools.partial(Training, sizes=SMALL))
    whole = train.train(QUICK, tmp_path / "whole", tell=lambda _: None)
    told: list[int] = []
    tell = lambda progress: told.append(progress.step)  # noqa: E731

    part = train.train(QUICK, tmp_path / "part", tell=tell, stop=lambda: told[-1] == 2)
    assert part.step == 2
    part = train.train(QUICK, tmp_path / "part", tell=tell)

    assert told == [1, 2, 3, 4, 5]
    assert all(torch.equal(it, weights(whole)[name]) for name, it in weights(part).items())


def test_an_error_within_a_step_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "Training", functools.partial(Training, sizes=SMALL))
    train.train(QUICK, tmp_path, tell=lambda _: None, stop=lambda: True)
    update = Training._update

    def half(training: Training) -> None:
        if training.step == 2:
            raise MemoryError
        update(training)

    monkeypatch.setattr(Training, "_update", half)
    with pytest.raises(MemoryError):
        train.train(QUICK, tmp_path, tell=lambda _: None)
    assert Training(QUICK, tmp_path, SMALL).step == 1


def test_a_checkpoint_of_other_wordings_is_refused(tmp_path, monkeypatch):
    Training(QUICK, tmp_path, SMALL).save()
    monkeypatch.setattr(wordings, "OPENINGS", ("Quixotic: ",))

    with pytest.raises(ConfigError, match="begun with other wordings"):
        Training(QUICK, tmp_path, SMALL)


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    training = Training(QUICK, tmp_path, SMALL)
    training.save()
    content = checkpoints.load(tmp_path)
    plan = content["plan"]
    for other in (plan | {"humour": 1}, {name: plan[name] for name in plan if name != "randomised"}):
        checkpoints.save(tmp_path, content | {"plan": other})
        with pytest.raises(ConfigError, match="another version of this program"):
            kept_plan(tmp_path)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    Training(QUICK, tmp_path, SMALL).save()
    content = checkpoints.load(tmp_path)
    content["optimizers"][0]["param_groups"] = [{"lr": 0.005, "momentum": 0.95, "params": [0]}]
    checkpoints.save(tmp_path, content)

    with pytest.raises(ConfigError) as refused:
        Training(QUICK, tmp_path, SMALL)
    assert refused.value.param == "--out"


def test_pictures_shown_to_the_vision_tower_alone_are_never_held_out_ones(monkeypatch):
    shown = []
    monkeypatch.setattr(batches, "rasterize", lambda scene, *how: shown.append(scene) or rasterize(scene, *how))
    for seed in range(4):
        batches.picture_batch(np.random.default_rng(seed), 60)

    assert len(shown) == 240
    assert not any(held_out(scene.shapes) for scene in shown)


def test_training_changes_every_part(tmp_path):
    training = Training(QUICK, tmp_path, SMALL)
    before = {name: it.clone() for name, it in weights(training).items()}
    for _ in training.run():
        pass

    assert [name for name, it in weights(training).items() if torch.equal(it, before[name])] == []


def test_a_checkpoint_of_another_plan_is_refused_and_named(tmp_path):
    Training(QUICK, tmp_path, SMALL).save()

    with pytest.raises(ConfigError, match="seed = 8, asked is 9"):
        Training(dataclasses.replace(QUICK, seed=9), tmp_path, SMALL)


def test_a_run_may_be_made_longer_only_before_its_learning_rate_falls(tmp_path):
    plan = dataclasses.replace(QUICK, dialogue_steps=4, falling=0.5)
    longer = dataclasses.replace(plan, dialogue_steps=8)
    training = Training(plan, tmp_path, SMALL)
    for _ in training.run(until=plan.level_steps):
        pass
    training.save()
    assert Training(longer, tmp_path, SMALL).step == 4

    for _ in training.run(until=plan.level_steps + 1):
        pass
    training.save()
    with pytest.raises(ConfigError, match="dialogue_steps"):
        Training(longer, tmp_path, SMALL)


def test_a_broken_checkpoint_says_what_to_do(tmp_path):
    (tmp_path / checkpoints.NAME).write_bytes(b"half a file")

    with pytest.raises(ConfigError, match="remove it to start anew"):
        kept_plan(tmp_path)


def test_a_folder_without_a_checkpoint_starts_anew(tmp_path):
    assert kept_plan(tmp_path / "nothing") is None
    assert Training(QUICK, tmp_path / "nothing", SMALL).step == 0


def test_a_checkpoint_replaces_the_one_before_and_leaves_nothing_else(tmp_path):
    training = Training(QUICK, tmp_path, SMALL)
    training.save()
    training.save()

    assert [path.name for path in tmp_path.iterdir()] == [checkpoints.NAME]
    assert kept_plan(tmp_path) == QUICK


def test_a_model_folder_is_replaced_only_where_one_was_written_before(tmp_path):
    training = Training(QUICK, tmp_path / "run", SMALL)
    model = tmp_path / "model"

    def write(**about: bool) -> None:
        export(training.network, training.encoder, model, {}, sizes=SMALL, **about)

    write()
    (model / "MODEL_CARD.md").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        write()
    write(replace=True)
    assert not (model / "MODEL_CARD.md").exists()

    (model / TRAINING).unlink()
    before = sorted(model.iterdir())
    with pytest.raises(ConfigError, match="is not empty"):
        write(replace=True)
    assert sorted(model.iterdir()) == before
    assert sorted(tmp_path.iterdir()) == [model]


def test_the_learning_rate_warms_up_stays_level_and_falls_to_zero():
    plan = Plan(vision_steps=100, dialogue_steps=200, falling=0.5, warm_up=10)
    paces = [plan.pace(step) for step in range(plan.steps)]

    assert paces[0] == paces[100] == 0.1  # each stage warms up
    assert set(paces[10:100]) == set(paces[110:200]) == {1.0}
    assert paces[250] == 0.5 and 0 < paces[-1] == 0.01
    assert plan.level_steps == 200
