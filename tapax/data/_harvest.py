"""`harvest`: run a function on batches and write a dataset of activations to disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tapax._calling.transform import check_function
from tapax._jax import trace_state_clean
from tapax._sites import Selection, wrong_type
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

    If a harvest stops, for whatever reason, a call with equal arguments continues it.

    Args:
        fn: A function of one batch, as `tapax.capture` takes it: a model of any framework, a jitted
            or sharded forward pass, or a loss or train step if you want its gradients. `harvest`
            computes only what the selected values and gradients need, and never changes objects
            such as the model.
        batches: A sequence of batches (a list, an array, a Grain source, a Hugging Face dataset),
            or an iterable, which cannot be resumed or shared. Batches may differ in shape.
        to: The folder of the dataset.
        values: Selects the sites whose values to store, as in `tapax.capture`.
        grads: Selects the sites whose gradients to store, under names like `GPT/blocks/3.grad`;
            `fn` must take a gradient itself.
        rows: The axes that become rows: `"tokens"` for all axes of a value except the last,
            `"examples"` for the first, or the numbers of axes of the captured array. The axes of
            loops stay within each row.
        layers: `"sites"` makes each scanned layer a site, such as `Stack/layers/3`; `"axis"` makes
            the layers an axis of each row.
        keep: A mask, True for each row to keep; or a function of a batch that returns a mask. The
            axes of the mask are the axes that become rows, or the first of these axes. The device
            drops all other rows.
        beside: A function of a batch that returns more columns, as a dict of arrays by name. The
            first axes of an array are the axes that become rows, or the first of these axes. A
            dataset always has the columns `batch` and `example`; it has `position` if an example
            has several rows, and `token` if the batch has tokens.
        dtype: The dtype in which to store floating-point values, such as `jnp.bfloat16` or
            `jnp.float8_e4m3fn`; the computed dtype if None. `harvest` counts the rows with numbers
            too large for `dtype`, and warns.
        shard_bytes: The approximate size of a shard, in bytes. The batches of a shard are one unit
            of work.
        units: The largest number of units of work to divide the batches into, instead of
            `shard_bytes`. All units except the last have equally many batches.
        seed: An integer with which to deal the batches out to the units in a random order, so that
            every shard has rows from all parts of `batches`. If None, the units follow the order of
            `batches`.
        worker: `(i, n)` for worker i of n, counted from 0, which begins with its share of the
            units. The dataset is equal, byte for byte, for any number of workers. If None, a
            process harvests alone, but each process of `jax.distributed` is a worker. If the arrays
            of `fn` span processes, these processes are one worker together, and each writes a part
            of the rows.
        take_over: Whether to continue with the units that other workers have not done, so that the
            dataset is complete when any worker ends; False if workers write to separate folders.
        progress: Whether to show a progress bar, in a terminal.

    Returns:
        The dataset, as `Activations`, which `tapax.open` reads later.

    Raises:
        TypeError: If an argument has the wrong type, or `harvest` is called in a function that JAX
            traces.
        SiteError: If a selection picks no site, or the sites have different rows.
        ValueError: If `batches` is empty, or is an iterable that `seed`, `units` or several workers
            cannot divide; or if the folder contains a dataset of another configuration, in which
            case the message names the difference.
        OSError: If the folder cannot be written, or the disk is full.
        RuntimeError: If another process harvests as the given `worker`.

    Example:
        >>> import tempfile, jax.numpy as jnp, tapax
        >>> def model(tokens):
        ...     return tapax.sow(jnp.sin(tokens[..., None] * jnp.arange(4.0)), "h")
        >>> batches = [jnp.arange(6).reshape(2, 3), jnp.arange(6, 12).reshape(2, 3)]
        >>> acts = tapax.harvest(model, batches, to=tempfile.mkdtemp(), values="h")
        >>> acts["h"].shape, acts["token"][:5].tolist()
        ((12, 4), [0, 1, 2, 3, 4])
    """
    check_function(fn, "harvest", returns_function=False)
    if not trace_state_clean():
        raise TypeError(
            "`harvest` writes to disk, so it cannot be called under jax.jit, grad, vmap or scan. "
            "Give it the function, and call it outside."
        )
    if not isinstance(to, (str, os.PathLike)):
        raise wrong_type("`to` takes the path of a folder, but is", to)
    if not os.fspath(to):
        raise ValueError("`to` takes the path of a folder, but is empty. Give '.' for this folder.")
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
        # Several processes would have to abandon a unit together, so they finish every unit.
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
    acts = Activations(folder.path)
    if acts.is_complete:
        folder.remove_leftovers()
    return acts


def _progress_note(folder: DatasetFolder, plan: UnitPlan) -> str:
    """Describe the units that a failed harvest has finished, for the note of its error."""
    done, count = len(folder.units_done()), plan.shard_count
    if count is None:
        return f"The harvest into {str(folder.path)!r} stopped after {done} complete units."
    return (
        f"The harvest into {str(folder.path)!r} stopped with {done} of {count} units done. "
        "Call it again with the same arguments to compute the others."
    )


def _write_index(folder: DatasetFolder, plan: UnitPlan, owner: str) -> None:
    """Write the index if all units are done."""
    done = folder.units_done()
    if folder.read_index(plan.shard_count) is None and len(done) == (plan.shard_count or len(done)):
        rows = {unit: folder.read_header(unit).rows for unit in done}
        try:
            folder.write_index(rows, owner)
        except OSError as error:
            raise folder.unwritable(error) from error
