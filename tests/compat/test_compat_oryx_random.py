"""`tapax.compat.oryx` on random programs, against an evaluation by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tapax.compat.oryx import nest
from tests.compat.test_compat_oryx import call_var, close, plant_var, reap_var, var

pytestmark = pytest.mark.once


def generate(rng, depth=2):
    """Draw a list of operations on a number; bodies are lists too, with branches of one kind."""
    ops = []
    for _ in range(rng.integers(1, 4)):
        kind = rng.choice(["sow", "sow", "scan", "cond", "jit", "remat", "nest"])
        factor = float(rng.uniform(0.5, 1.5))
        if kind == "sow" or depth == 0:
            ops.append(("sow", str(rng.choice(["a0", "a1", "c0", "c1"])), factor))
        elif kind == "scan":
            ops.append(("scan", int(rng.integers(1, 4)), generate(rng, depth - 1)))
        elif kind == "cond":
            body = generate(rng, depth - 1)
            ops.append(("cond", float(rng.uniform(0.5, 1.5)), body, scaled(body, -0.7)))
        else:
            ops.append((str(kind), generate(rng, depth - 1)))
    return ops


def scaled(ops, by):
    """Scale the numbers that the operations sow."""
    is_sow = lambda op: op[0] == "sow"
    return [(*op[:2], op[2] * by) if is_sow(op) else op for op in ops]


def traced(ops, x):
    for kind, *rest in ops:
        body = functools.partial(traced, rest[-1])
        if kind == "sow":
            mode = {"a": "append", "c": "clobber"}[rest[0][0]]
            x = var(jnp.sin(x * rest[1]) + 1, name=rest[0], mode=mode)
        elif kind == "scan":
            x = lax.scan(lambda c, _, body=body: (body(c), None), x, length=rest[0])[0]
        elif kind == "cond":
            x = lax.cond(x > rest[0], functools.partial(traced, rest[1]), body, x)
        else:
            wrap = {"jit": jax.jit, "remat": jax.checkpoint}.get(kind)
            x = (wrap(body) if wrap else nest(body, scope="s"))(x)
    return x


def by_hand(ops, x, plants=None):
    """Compute the results and sows of a program: clobbered values, and lists of appended ones.

    A part is a number, or the list that a loop makes.
    """
    reaps = {}

    def add(more, scope=()):
        for name, new in more.items():
            known = reaps.setdefault((*scope, *name), [])
            known[:] = known + new if name[-1][0] == "a" else new

    for kind, *rest in ops:
        if kind == "sow":
            x = np.sin(x * rest[1]) + 1
            x = plants[rest[0]].pop(0) if plants and rest[0] in plants else x
            add({(rest[0],): [x]})
        elif kind == "scan":
            steps = []
            for _ in range(rest[0]):
                x, more = by_hand(rest[1], x, plants)
                steps.append(more)
            last = steps[-1].items()
            each = {n: [[joined(s[n]) for s in steps]] if n[-1][0] == "a" else v for n, v in last}
            add(each)
        elif kind == "cond":
            x, more = by_hand(rest[1] if x > rest[0] else rest[2], x, plants)
            # A conditional counts as one sow.
            add({n: [np.asarray(joined(v))] if is_one(v) else v for n, v in more.items()})
        else:
            x, more = by_hand(rest[0], x, plants)
            add(more, ("s",) if kind == "nest" else ())
    return x, reaps


def is_one(parts):
    return len(parts) == 1 and not isinstance(parts[0], list)


def joined(parts):
    if len(parts) == 1:
        return parts[0]
    return [x for part in parts for x in (part if isinstance(part, list) else [part])]


def count(ops, name):
    """Count the sows of a name."""
    return sum(op[1] == name if op[0] == "sow" else count(op[-1], name) for op in ops)


def nested(reaps):
    tree = {}
    for (*scopes, name), parts in reaps.items():
        inner = tree
        for scope in scopes:
            inner = inner.setdefault(scope, {})
        inner[name] = np.array(joined(parts))
    return tree


@pytest.mark.parametrize("seed", range(5))
def test_random_programs_are_harvested_as_by_hand(seed):
    rng = np.random.default_rng(seed)
    ops = generate(rng)
    out, reaps = by_hand(ops, 0.8)
    program = functools.partial(traced, ops)
    try:
        reaps = nested(reaps)
    except ValueError:  # the appended values differ in length
        with pytest.raises(tapax.SiteError, match="has values of different types"):
            reap_var(program)(0.8)
        return
    close(call_var(program)(0.8), (out, reaps))
    close(call_var(jax.grad(program))(0.8), (jax.grad(program)(0.8), reaps))


@pytest.mark.parametrize("seed", range(5))
def test_plants_in_a_random_program(seed):
    rng = np.random.default_rng(seed)
    ops = [op for op in generate(rng) if "nest" not in repr(op)]
    _, reaps = by_hand(ops, 0.8)
    program = plant_var(functools.partial(traced, ops))
    for (name,), parts in reaps.items():
        value = np.array(joined(parts)) if name[0] == "c" or count(ops, name) == 1 else 0.0
        value = rng.uniform(0.5, 1.5, np.shape(value))
        plants = {name: jnp.asarray(value)}
        if name[0] == "a" and count(ops, name) > 1:
            with pytest.raises(tapax.SiteError, match="already been planted"):
                program(plants, 0.8)
            continue
        due = list(value.reshape(-1)) if name[0] == "a" else [value] * 1000
        close(program(plants, 0.8), by_hand(ops, 0.8, {name: due})[0])
        assert name[0] == "c" or not due
