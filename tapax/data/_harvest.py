"""`harvest`: from a function and batches to a dataset of activations on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tapax._calling.transform import check_function
from tapax._jax import trace_state_clean
from tapax._sites import Selection
from tapax._walk.plan import Plan
from tapax.data._activations import Activations
from tapax.data._arguments import as_integer
from tapax.data._batch_source import BatchSource
from tapax.data._columns import Beside, Keep
from tapax.data._configuration import check_dtype, make_manifest
from tapax.data._folder import DatasetFolder
from tapax.data._meter import Meter
from tapax.data._pipeline import Pipeline
from tapax.data._process_group import find_processes
from tapax.data._progress import show_progress
from tapax.data._row_layout import RowLayout
from tapax.data._row_program import RowProgram
from tapax.data._units import UnitPlan, Worker
from tapax.data._work_sharing import FolderUnits, choose_units, lock_worker, worker_choices


def harvest(
    fn: Callable[..., Any],
    batches: Iterable[Any],
    to: str | os.PathLike[str],
    values: Selection = "**",
    grads: Selection = None,
    *,
    rows: str | Sequence[int] = "tokens",
    layers: str = "sites",
    keep: Keep = None,
    beside: Beside = None,
    dtype: Any = None,
    shard_bytes: int = 2**28,
    units: int | None = None,
    seed: int | None = None,
    worker: tuple[int, int] | None = None,
    take_over: bool = True,
    progress: bool = True,
) -> Activations:
    """Run `fn` on every batch and store the values of its sites as a dataset on disk.

    Calling it again with the same arguments goes on where it stopped, whatever stopped it.

    Args:
        fn: a function of one batch that `capture` takes: a model of any framework, a jitted or
            sharded forward pass, a loss or train step whose gradients are wanted. What no selected
            value or gradient needs is not computed, and objects such as the model stay as they are.
        batches: a sequence of batches (a list, an array, a Grain source, a dataset of Hugging
            Face), or an iterable, which cannot be resumed or shared. They may differ in shape.
        to: the folder of the dataset.
        values: selects the sites whose values to store.
        grads: selects the sites whose gradients to store, as `GPT/blocks/3.grad`; `fn` must take a
            gradient itself.
        rows: `"tokens"`: all axes of a value but the last become rows; `"examples"`: the first
            does; or the numbers of axes of the captured array. Axes of loops stay in the row.
        layers: `"sites"`: every layer of scanned layers is a site, `Stack/layers/3`; `"axis"`: they
            are an axis of each row.
        keep: a mask of the rows to keep, or a function of a batch that returns one; its first axes
            are those of the rows. The others are dropped on the device.
        beside: a function of a batch that returns columns, a dict of arrays whose first axes are
            those of the rows. The columns `batch`, `example`, `position` and, where the batch has
            it, `token` are there without it.
        dtype: the type in which floating-point values are stored, such as `jnp.bfloat16` or
            `jnp.float8_e4m3fn`; their own if None. Numbers too large for it are counted and
            warned of.
        shard_bytes: about how large a shard is; its batches are one unit of work.
        units: into how many units of work to divide the batches, instead of by `shard_bytes`.
        seed: deals the batches out to the units in a random order, so that every shard has rows
            from everywhere; in order if None.
        worker: `(i, n)` for worker i of n, which begins with its share of the units. The dataset is
            the same, byte for byte, however many workers there are. If None, a process harvests
            alone; each of several processes of `jax.distributed` is a worker, unless the arrays of
            `fn` span them: then they are one worker together, and each writes a part of the rows.
        take_over: whether to go on with the units that other workers have not done, so that the
            dataset is complete when any worker ends; False if workers write to separate folders.
        progress: whether to show a progress bar, in a terminal.

    Returns:
        The dataset, which `tapax.open` reads later.

    Raises:
        SiteError: if a selection picks no site, or if sites do not have the same rows.
        ValueError: if the folder holds a dataset of another configuration; the message names the
            difference.
        OSError: if the folder cannot be written, or the disk is full.
        RuntimeError: if another process harvests with the same worker number.

    >>> import tempfile, jax.numpy as jnp, tapax
    >>> def model(tokens):
    ...     return tapax.sow(jnp.sin(tokens[..., None] * jnp.arange(4.0)), "h")
    >>> batches = [jnp.arange(6).reshape(2, 3), jnp.arange(6, 12).reshape(2, 3)]
    >>> acts = tapax.harvest(model, batches, to=tempfile.mkdtemp(), values="h")
    >>> acts["h"].shape, acts["token"][:5].tolist()
    ((12, 4), [0, 1, 2, 3, 4])
    """
    check_function(fn, "harvest")
    if not trace_state_clean():
        raise TypeError(
            "`harvest` writes to disk, so it cannot be called under jax.jit, grad, vmap or scan. "
            "Give it the function, and call it outside."
        )
    share = None if worker is None else Worker.of(worker)
    seed = None if seed is None else as_integer("seed", seed)
    layout = RowLayout.of(rows, layers)
    stored = check_dtype(dtype)
    plan = Plan.make(values, grads)
    source = BatchSource(batches)
    source.check(share or Worker(), seed)
    program = RowProgram(fn, plan, layout, stored)
    described = program.describe(source.first)
    processes = find_processes(described.inputs)
    workers = [share] if share else worker_choices(processes)
    source.check(workers[0], seed)
    manifest = make_manifest(
        described,
        source.first,
        plan=plan,
        layout=layout,
        keep=keep,
        beside=beside,
        dtype=stored,
        shard_bytes=shard_bytes,
        units=units,
        seed=seed,
        batches=source.count,
        processes=processes.count,
    )
    folder = DatasetFolder(to)
    with contextlib.ExitStack() as stack:
        share, owner = lock_worker(folder, workers, processes, stack)
        source.check_new(folder)
        processes.wait()
        folder.create(owner)
        folder.begin(manifest, owner)
        storage = FolderUnits(folder, manifest.unit_plan)
        meter = Meter()
        pipeline = Pipeline(program, folder, manifest, keep, beside, meter, owner, processes)
        chosen = choose_units(storage, share, processes, take_over=take_over, meter=meter)
        # Several processes would have to leave a unit together, so they never do.
        is_done = storage.is_done if processes.count == 1 else lambda unit: False
        tasks = source.tasks(storage.plan, chosen, meter, is_done)
        try:
            with show_progress(meter, enabled=progress and processes.index == 0):
                pipeline.run(tasks)
        except Exception as error:
            error.add_note(_progress_note(folder, storage.plan))
            raise
        processes.wait()
        if processes.index == 0:
            _write_index(folder, storage.plan, owner)
        processes.wait()
    return Activations(folder.path)


def _progress_note(folder: DatasetFolder, plan: UnitPlan) -> str:
    """Say what an error leaves behind."""
    done, count = len(folder.units_done()), plan.shard_count
    if count is None:
        return f"The harvest into {str(folder.path)!r} stopped after {done} whole units."
    return (
        f"The harvest into {str(folder.path)!r} stopped with {done} of {count} units done. They "
        "stay: the same call goes on with the others."
    )


def _write_index(folder: DatasetFolder, plan: UnitPlan, owner: str) -> None:
    """Write the index if all units are done."""
    done = folder.units_done()
    if folder.read_index() is None and len(done) == (plan.shard_count or len(done)):
        rows = {unit: folder.read_header(unit).rows for unit in done}
        try:
            folder.write_index(rows, owner)
        except OSError as error:
            raise folder.unwritable(error) from error
