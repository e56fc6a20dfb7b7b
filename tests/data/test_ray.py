"""Harvests on Ray, with real actors on this machine."""

import io
import os
import signal
from pathlib import Path

import pytest
import ray
from rich.console import Console
from rich.progress import Progress

from tests.models import harvested

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    """Start a cluster with two CPUs; every actor of the tests takes one."""
    environment = {"env_vars": {"PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=2**27,
        runtime_env=environment,
    )
    yield
    ray.shutdown()


def make_model():
    from tests.models.harvested import model

    return model


class DeadlyBatches(list):
    """Batches of which one kills the first process that reads it."""

    def __init__(self, batches, number, marker):
        super().__init__(batches)
        self.number, self.marker = number, marker

    def __reduce__(self):
        return DeadlyBatches, (list(self), self.number, self.marker)

    def __getitem__(self, number):
        if number == self.number and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


OPTIONS = {"units": 12, "num_workers": 2, "num_cpus": 1}
SITES = ["net/embed", "net/hidden"]


@pytest.mark.many
def test_a_killed_actor_changes_nothing(tmp_path):
    from tapax.data.ray import harvest

    batches = harvested.make_batches(24)
    deadly = DeadlyBatches(batches, 9, str(tmp_path / "killed"))
    acts = harvest(make_model, deadly, tmp_path / "acts", SITES, **OPTIONS)
    assert (tmp_path / "killed").exists()
    assert acts.is_complete and acts.verify().is_whole
    harvested.harvest(tmp_path / "alone", batches=batches, units=12)
    assert harvested.read_files(tmp_path / "acts") == harvested.read_files(tmp_path / "alone")


@pytest.mark.many
def test_actors_that_ray_gives_up_are_replaced_by_the_others(tmp_path):
    from tapax.data.ray import harvest

    batches = harvested.make_batches(24)
    deadly = DeadlyBatches(batches, 9, str(tmp_path / "killed"))
    options = {**OPTIONS, "max_restarts": 0}
    with pytest.warns(UserWarning, match="1 of the actors died, and Ray did not start them again"):
        acts = harvest(make_model, deadly, tmp_path / "acts", SITES, **options)
    assert acts.is_complete
    harvested.harvest(tmp_path / "alone", batches=batches, units=12)
    assert harvested.read_files(tmp_path / "acts") == harvested.read_files(tmp_path / "alone")


def test_the_driver_counts_the_shards_that_are_there(tmp_path):
    from tapax.data.ray._actor_harvest import _update

    shown = Progress(console=Console(file=io.StringIO(), force_terminal=True))
    task = shown.add_task("harvest", total=None)
    _update(shown, task, str(tmp_path))  # before the dataset exists
    harvested.harvest(tmp_path, (0, 2), take_over=False)
    _update(shown, task, str(tmp_path))
    assert (shown.tasks[0].completed, shown.tasks[0].total) == (2, 4)


def test_an_error_of_an_actor_is_raised_by_the_driver(tmp_path):
    from tapax.data.ray import harvest

    with pytest.raises(Exception, match="net/hiden"):
        harvest(make_model, harvested.make_batches(), tmp_path, "net/hiden", **OPTIONS)
    with pytest.raises(TypeError, match="`worker` is not an option here"):
        harvest(make_model, harvested.make_batches(), tmp_path, worker=(0, 1), **OPTIONS)
