"""Actors that harvest, and the driver that waits for the actors."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tapax._sites import Selection, wrong_type
from tapax.data._activations import Activations
from tapax.data._arguments import as_integer
from tapax.data._folder import DatasetFolder, is_dataset
from tapax.data._manifest import Manifest

# A type checker that does not find Ray would resolve `import ray` to this package.
ray: Any = importlib.import_module("ray")

_SECONDS = 2.0
"""The interval at which the driver counts the shards in the folder."""


def harvest(
    make_fn: Callable[[], Callable[..., Any]],
    batches: Sequence[Any],
    to: str | os.PathLike[str],
    values: Selection = "**",
    grads: Selection = None,
    *,
    num_workers: int,
    num_gpus: float = 0,
    num_cpus: float = 1,
    max_restarts: int = 8,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Activations:
    """Harvest with Ray actors, each of which is a worker of `tapax.harvest`.

    Ray restarts an actor that dies, and the actor continues; meanwhile the other actors do its
    units. The dataset is equal, byte for byte, to the dataset that one process would write.

    Args:
        make_fn: A function without arguments that returns the function to harvest. Each actor calls
            `make_fn`, so that JAX starts there, with the devices that Ray gave to the actor.
        batches: A sequence of batches, which Ray copies to each actor once. For data that does not
            fit in memory, pass an object whose `[]` reads one batch from a file.
        to: The folder of the dataset, which all actors and the driver can reach by this path.
        values: Selects the sites whose values to store.
        grads: Selects the sites whose gradients to store.
        num_workers: The number of actors.
        num_gpus: The number of GPUs of each actor.
        num_cpus: The number of CPUs of each actor.
        max_restarts: The number of times that Ray restarts each actor; -1 for no limit. If every
            actor has died for good before the dataset is complete, `harvest` raises the last error.
        resources: Other Ray resources that each actor takes.
        runtime_env: The Ray runtime environment of the actors.
        progress: Whether the driver shows a progress bar, in a terminal.
        **options: Other arguments of `tapax.harvest`, except `worker` and `take_over`.

    Returns:
        The dataset, as `Activations`.

    Raises:
        TypeError: If an argument has the wrong type, or `options` has `worker` or `take_over`.
        Exception: The error that `tapax.harvest` raised in an actor. The shards that are written
            stay, and an equal call continues.

    Example:
        >>> harvest(lambda: print, [], "acts", num_workers=0)
        Traceback (most recent call last):
        ...
        TypeError: `num_workers` takes an integer, 1 at least, but is 0 of type int.
    """
    count = as_integer("num_workers", num_workers, 1)
    if not callable(make_fn):
        raise wrong_type("`make_fn` takes a function that returns the function, but is", make_fn)
    for name in ("worker", "take_over"):
        if name in options:
            raise TypeError(f"`{name}` is not an option here: every actor is a worker.")
    path = os.path.abspath(to)
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    actor = ray.remote(
        num_gpus=num_gpus,
        num_cpus=num_cpus,
        max_restarts=max_restarts,
        max_task_retries=max_restarts,
        resources=dict(resources or {}),
        runtime_env=dict(runtime_env or {}),
    )(_Worker)
    made, shared = ray.put(make_fn), ray.put(batches)
    options = {**options, "values": values, "grads": grads}
    actors = [actor.remote() for _ in range(count)]
    try:
        running = [
            each.harvest.remote(made, shared, path, (index, count), options)
            for index, each in enumerate(actors)
        ]
        _wait(running, path, progress)
    finally:
        for each in actors:
            ray.kill(each)
    return Activations(to)


class _Worker:
    """An actor that harvests as one worker; it has no state, so that Ray can restart it."""

    def harvest(
        self,
        make_fn: Callable[[], Callable[..., Any]],
        batches: Sequence[Any],
        to: str,
        worker: tuple[int, int],
        options: dict[str, Any],
    ) -> int:
        """Harvest, and return the number of rows that the dataset has afterwards."""
        from tapax.data._harvest import harvest as harvest_here

        acts = harvest_here(make_fn(), batches, to, worker=worker, progress=False, **options)
        return len(acts)


def _wait(running: list[Any], to: str, progress: bool) -> None:
    """Wait until all actors have ended, and raise the error that an actor raised.

    A single actor can complete the dataset, so this only warns of actors that Ray did not restart.
    """
    lost: list[Exception] = []
    with _bar(enabled=progress) as bar:
        task = bar.add_task("harvest", total=None)
        while running:
            ended, running = ray.wait(running, timeout=_SECONDS)
            _update(bar, task, to)
            for one in ended:
                try:
                    ray.get(one)
                except ray.exceptions.RayActorError as error:
                    lost.append(error)
                    if not running and not Activations(to).is_complete:
                        raise
        _update(bar, task, to)
    if lost:
        warnings.warn(
            f"{len(lost)} of the actors died, and Ray did not start them again; the others did "
            f"their units. The last one: {lost[-1]}",
            stacklevel=3,
        )


def _bar(*, enabled: bool) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("harvest"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"))
    hidden = not (enabled and console.is_terminal)
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden)


def _update(bar: Progress, task: Any, to: str) -> None:
    if not bar.disable and is_dataset(to):
        folder = DatasetFolder(to)
        total = Manifest.read(folder.path).unit_plan.shard_count
        bar.update(task, completed=len(folder.units_done()), total=total)
