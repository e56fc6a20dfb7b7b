"""The rows of the table."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from conformance import problem
from conformance.problem import LONG, MANY, Case, again, each, over_time, stack, straight

FORMS = {
    "around": "{}, around the model",
    "lifted": "{}, the framework's version",
    "undeclared": "{}, the framework's version, nothing declared",
    "closed": "{}, layer closed over",
    "argument": "{}, layer as an argument",
}
_INSIDE = ("lifted", "closed", "argument")
_EVERY = ("around", *_INSIDE)
_WHILE: Any = {"stacked": True, "last": True}
_TRANSFORMS: list[tuple[str, str, Any, dict[str, Any], Any]] = [
    ("jit", "jit", straight, {}, _EVERY),
    ("vmap", "vmap", each, {"x": MANY, "stacked": True}, FORMS),
    ("map", "lax.map", each, {"x": MANY, "stacked": True}, ("around", "lifted", "closed")),
    ("remat", "remat", straight, {}, _EVERY),
    (
        "custom_vjp",
        "custom_vjp whose backward function runs the layer again",
        straight,
        {},
        ("around", "argument"),
    ),
    ("shard_map", "shard_map", problem.halves, {"x": LONG, "stacked": True}, _EVERY),
]
_LOOPS: list[tuple[str, str, Any, dict[str, Any], Any]] = [
    ("scan", "scan over time", over_time, {"x": MANY, "stacked": True}, FORMS),
    ("fori_loop", "fori_loop", again, {"stacked": True}, _INSIDE),
    ("while_loop", "while_loop", again, {**_WHILE, "backward": False}, _INSIDE),
    ("while_grad", "while_loop with a gradient (Equinox)", again, _WHILE, ("closed",)),
    ("custom_root", "custom_root", problem.solved, {"last": True, "implicit": True}, ("closed",)),
    (
        "root_forward",
        "custom_root without a gradient",
        problem.solved,
        {"last": True, "implicit": True, "backward": False},
        ("closed",),
    ),
    ("cond", "cond, one branch has a layer", straight, {}, _INSIDE),
    (
        "vmap_cond",
        "vmap of cond",
        problem.some,
        {"x": MANY, "stacked": True, "masked": True},
        ("around", "closed"),
    ),
    (
        "vmap_cond_cond",
        "vmap of a cond in a cond",
        problem.few,
        {"x": MANY, "stacked": True, "masked": True},
        ("around", "closed"),
    ),
]


def _cases(transforms: list[tuple[str, str, Any, dict[str, Any], Any]]) -> list[Case]:
    return [
        Case(f"{name}/{form}", FORMS[form].format(title), reference, **options)
        for name, title, reference, options, forms in transforms
        for form in forms
    ]


def _trains(name: str, title: str, **options: Any) -> Case:
    return Case(name, title, straight, answer=problem.trained, stacked=True, **options)


SECTIONS = {
    "Whole steps": [
        Case("straight", "no transformation", straight),
        Case("train", "train step that takes the gradient and updates the state", straight),
        Case("cached", "jit around the step, called before the capture", straight),
        Case("jit/ran", "jit, model closed over, called before the capture", straight),
        Case("sharded", "jit on a mesh with explicit axes", straight, MANY, sharded=True),
        _trains("train_scan", "training loop in a scan, gradient inside"),
        _trains("train_while", "training loop in a while_loop, gradient inside", last=True),
    ],
    "Transformations": _cases(_TRANSFORMS),
    "Loops and branches": _cases(_LOOPS),
    "Layers": [
        Case("stack/lifted", "stacked layers, the framework's scan", stack, stacked=True),
        Case(
            "stack/undeclared",
            "stacked layers, the framework's scan, nothing declared",
            stack,
            stacked=True,
        ),
        Case("stack/raw", "stacked layers, lax.scan", stack, stacked=True),
        Case("rnn", "the framework's RNN", problem.recurrent, MANY, stacked=True),
        Case("twice", "one layer called twice", problem.twice),
        Case("broadcast", "one layer called on batches of 4 and of 1", problem.broadcast, MANY),
        Case("shared", "one layer in two modules", problem.shared),
        Case("unedited", "two layers of an unedited Sequential", problem.two_layers),
    ],
    "Calls": [
        Case("keyword", "model as a keyword argument", straight),
        Case("second", "a second model among the arguments", problem.with_teacher),
        Case("nested", "a capture in a capture", problem.nested),
        Case("exception", "capture after an exception in a layer", straight),
        Case("mutated", "closed-over weights replaced between calls", problem.doubled),
        Case("unknown", "a site that does not exist must raise", straight, refused=True),
    ],
    "Arrays": [
        Case("bf16", "bfloat16", straight, dtype=jnp.bfloat16),
        Case("bf16/init", "bfloat16, initialized in float32", straight, dtype=jnp.bfloat16),
        Case("batch/init", "batch of 4, initialized with a batch of 1", straight, MANY),
        Case("sum", "values summed over a scan", over_time, MANY, backward=False, total=True),
        Case("tuple", "a value that is a tuple", problem.pair),
    ],
}
"""The cases by the heading that the table gives them."""

CASES = [case for cases in SECTIONS.values() for case in cases]
