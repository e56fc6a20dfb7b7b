"""Patching, against the model with hand-written hooks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapax
from tapax import attribute
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

LAYERS, LENGTH, WIDTH, VOCAB = 3, 4, 4, 7


def keep(name, value):
    return value


def params(seed=0):
    rng = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 0.6, jnp.float32)
    one = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    blocks = {name: array(LAYERS, *shape) for name, shape in one.items()}
    return {"embed": array(VOCAB, WIDTH), "place": array(LENGTH, WIDTH), "blocks": blocks}


def normed(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3)


def block(p, x, hook, name=""):
    q, k, v = jnp.split(normed(x) @ p["qkv"], 3, -1)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), q @ jnp.swapaxes(k, 1, 2), -1e9)
    x = x + hook(f"{name}attn", jax.nn.softmax(scores) @ v)
    x = x + hook(f"{name}mlp", jax.nn.gelu(normed(x) @ p["up"]) @ p["down"])
    return hook(f"{name}resid", x)


def logits(p, tokens, hook=keep):
    x = hook("embed", p["embed"][tokens] + p["place"])
    for i in range(LAYERS):
        x = block({k: w[i] for k, w in p["blocks"].items()}, x, hook, f"{i}/")
    return normed(x) @ p["embed"].T


def scanned(p, tokens):
    x = sow("embed", p["embed"][tokens] + p["place"])
    x, _ = jax.lax.scan(lambda x, p: (block(p, x, sow), None), x, p["blocks"])
    return difference(normed(x) @ p["embed"].T)


def sow(name, value):
    return tapax.sow(value, name)


def difference(logits):
    return logits[0, -1, 2] - logits[0, -1, 3]


def first_two(logits):
    return logits[:, -1, :2]


def marked(p, tokens):
    return difference(logits(p, tokens, sow))


def two_numbers(p, tokens):
    return first_two(logits(p, tokens, sow))


@jax.jit
def values_of(p, tokens):
    """Compute the inner values without tapax."""
    kept = {}
    logits(p, tokens, lambda name, value: kept.setdefault(name, value))
    return kept


@functools.partial(jax.jit, static_argnames=("name", "reduce"))
def patched(p, clean, corrupt, name, position=None, reduce=difference):
    """Compute the metric with a value replaced, without tapax."""
    new = values_of(p, clean)[name]

    def hook(here, value):
        if here != name:
            return value
        return new if position is None else value.at[:, position].set(new[:, position])

    return reduce(logits(p, corrupt, hook))


P = params()
CLEAN = jnp.array([[1, 2, 4, 5]])
CORRUPT = jnp.array([[1, 6, 0, 5]])
SITES = [f"{i}/{part}" for i in range(LAYERS) for part in ("attn", "mlp", "resid")]


both_methods = pytest.mark.parametrize(
    "method",
    [attribute.activation_patching, attribute.attribution_patching],
    ids=lambda m: m.__name__,
)


def close(a, b):
    assert_close(a, b, 1e-4)


def by_hand(sites=SITES, positions=range(LENGTH), **how):
    rows = [[patched(P, CLEAN, CORRUPT, s, i, **how) for i in positions] for s in sites]
    return jnp.array(rows)


@pytest.mark.parametrize(("fn", "batch_size"), [(marked, None), (jax.jit(marked), 2)])
def test_activation_patching_at_every_position(fn, batch_size):
    got = attribute.activation_patching(
        fn, (P, CLEAN), (P, CORRUPT), SITES, range(LENGTH), batch_size=batch_size
    )
    assert got.shape == (len(SITES), LENGTH)
    close(got, by_hand())


def test_activation_patching_of_whole_values():
    got = attribute.activation_patching(marked, (P, CLEAN), (P, CORRUPT), SITES)
    close(got, [patched(P, CLEAN, CORRUPT, s) for s in SITES])


@pytest.mark.many
def test_one_argument_and_an_array_as_metric():
    fn = lambda tokens: two_numbers(P, tokens)
    got = attribute.activation_patching(fn, CLEAN, CORRUPT, ["0/mlp", "1/attn"], [0, -1])
    assert got.shape == (2, 2, 1, 2)
    close(got, by_hand(["0/mlp", "1/attn"], [0, -1], reduce=first_two))


def test_globs_are_in_the_order_of_the_program():
    got = attribute.activation_patching(marked, (P, CLEAN), (P, CORRUPT), "*/resid", [1])
    close(got, by_hand([f"{i}/resid" for i in range(LAYERS)], [1]))
    named = lambda site: site.path.endswith("mlp")
    got = attribute.activation_patching(marked, (P, CLEAN), (P, CORRUPT), named, [1])
    close(got, by_hand([f"{i}/mlp" for i in range(LAYERS)], [1]))


@pytest.mark.many
@both_methods
def test_iterations_of_a_scan(method):
    """The result has one row for every iteration, or for the selected iterations."""
    both = (P, CLEAN), (P, CORRUPT)
    loop = method(marked, *both, [f"{i}/mlp" for i in range(LAYERS)], range(LENGTH))
    close(method(scanned, *both, "mlp", range(LENGTH)), loop)
    picked = [tapax.at("mlp", step=2), tapax.at("mlp", step=0)]
    close(method(scanned, *both, picked, range(LENGTH)), loop[jnp.array([2, 0])])
    close(method(scanned, *both, tapax.at("mlp", step=slice(1, None)), [3]), loop[1:, 3:4])
    close(method(scanned, *both, tapax.at("mlp", step=-1)), method(marked, *both, "2/mlp"))


def test_activation_patching_along_another_axis():
    """Patch each unit instead of each position."""
    got = attribute.activation_patching(
        marked, (P, CLEAN), (P, CORRUPT), ["1/mlp"], range(WIDTH), axis=-1
    )
    new = values_of(P, CLEAN)["1/mlp"]
    for unit in range(WIDTH):
        mixed = lambda v, u=unit: v.at[..., u].set(new[..., u])
        hook = lambda n, v, mixed=mixed: mixed(v) if n == "1/mlp" else v
        close(got[0, unit], difference(logits(P, CORRUPT, hook)))


def test_calls_of_one_name_are_rows():
    f = lambda x: tapax.sow(2 * tapax.sow(x + 1, "h"), "h").sum()
    got = attribute.activation_patching(f, jnp.ones((2, 1)), jnp.zeros((2, 1)), "h", [0, 1])
    close(got, [[6.0, 6.0], [6.0, 6.0]])
    got = attribute.activation_patching(f, jnp.ones((2, 1)), jnp.zeros((2, 1)), "h@1", [0])
    assert got.shape == (1, 1)


def test_values_that_no_one_marked():
    f = lambda x: jnp.sum(jnp.sin(x) ** 2)
    got = attribute.activation_patching(
        f, jnp.ones((2, 1)), jnp.zeros((2, 1)), tapax.ops("sin"), [0]
    )
    close(got, [[np.sin(1.0) ** 2]])


def compilations(caplog, run):
    caplog.clear()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        jax.block_until_ready(run())
    return [r.message for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


def test_a_sweep_is_compiled_once(caplog):
    fn = jax.jit(lambda p, tokens: marked(p, tokens))
    both = [(P, CLEAN), (P, CORRUPT)]
    run = lambda: attribute.activation_patching(fn, *both, SITES[:4], range(LENGTH))
    assert len(compilations(caplog, run)) == 1
    assert not compilations(caplog, run)
    whole = jax.jit(lambda a, b, i: attribute.activation_patching(marked, a, b, "*/mlp", i))
    close(whole(*both, jnp.arange(2)), by_hand(SITES[1::3], range(2)))
    assert not compilations(caplog, lambda: whole(*both[::-1], jnp.arange(2)))


def test_operations_before_a_site_run_once():
    """For each position, only the layers after the patch run."""
    both = (P, CLEAN), (P, CORRUPT)
    sites = [f"{i}/resid" for i in range(LAYERS)]

    def flops(fn):
        return jax.jit(fn).lower(*both).compile().cost_analysis()["flops"]

    plain = flops(lambda a, b: difference(logits(*a)))
    one_block = flops(lambda a, b: block(jax.tree.map(lambda w: w[0], a[0]["blocks"]),
                                         a[0]["embed"][a[1]], keep))  # fmt: skip
    got = flops(lambda a, b: attribute.activation_patching(marked, a, b, sites, range(LENGTH)))
    head = plain - LAYERS * one_block
    needed = 2 * plain + LENGTH * (sum(range(LAYERS)) * one_block + LAYERS * head)
    assert got < 1.15 * needed


def test_a_plain_function_is_seen_as_it_is_now():
    scale = [1.0]
    f = lambda x: tapax.sow(x, "h").sum() * scale[0]
    sweep = lambda: attribute.activation_patching(f, jnp.ones((1, 1)), jnp.zeros((1, 1)), "h")
    assert sweep().tolist() == [1.0]
    scale[0] = 2.0
    assert sweep().tolist() == [2.0]


def test_activation_patching_at_traced_positions():
    f = lambda i: attribute.activation_patching(marked, (P, CLEAN), (P, CORRUPT), "1/mlp", i)
    got = jax.jit(f)(jnp.array([1, -2, LENGTH]))
    close(got[0, :2], by_hand(["1/mlp"], [1, -2])[0])
    assert jnp.isnan(got[0, 2])


@pytest.mark.many
def test_gradient_of_a_sweep():
    """The gradient by the parameters goes through every patched run."""
    sweep = lambda p: attribute.activation_patching(marked, (p, CLEAN), (p, CORRUPT), "1/mlp", [1])
    hand = lambda p: patched(p, CLEAN, CORRUPT, "1/mlp", 1)
    got, want = (jax.jit(jax.grad(f))(P) for f in (lambda p: sweep(p).sum(), hand))
    jax.tree.map(close, got, want)


@pytest.mark.parametrize("fn", [marked, two_numbers])
def test_attribution_patching_is_a_gradient_product(fn):
    sites = ["0/attn", "1/mlp", "2/resid"]
    got = attribute.attribution_patching(fn, (P, CLEAN), (P, CORRUPT), sites, range(LENGTH))
    there, here = values_of(P, CLEAN), values_of(P, CORRUPT)
    reduce = difference if fn is marked else first_two
    for row, name in zip(got, sites, strict=True):

        def moved(new, name=name):
            return reduce(logits(P, CORRUPT, lambda n, v: new if n == name else v))

        moved = jax.jit(moved)
        delta = there[name] - here[name]
        for i in range(LENGTH):
            only = jnp.zeros_like(delta).at[:, i].set(delta[:, i])
            value, change = jax.jvp(moved, (here[name],), (only,))
            close(row[i], value + change)


def test_attribution_patching_of_whole_values():
    run = attribute.attribution_patching
    got = run(marked, (P, CLEAN), (P, CORRUPT), "*/mlp")
    each = run(marked, (P, CLEAN), (P, CORRUPT), "*/mlp", range(LENGTH))
    base = difference(logits(P, CORRUPT))
    close(got - base, (each - base).sum(1))


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def path_by_hand(sender, receiver, position, frozen):
    """Run twice with hooks: first record the receiver, then use it."""
    there, here = values_of(P, CLEAN), values_of(P, CORRUPT)
    seen = {}

    def gather(name, value):
        if name == sender:
            value = value.at[:, position].set(there[name][:, position])
        elif name == receiver:
            seen[name] = value
        elif name in frozen:
            value = here[name]
        return value

    logits(P, CORRUPT, gather)
    return difference(logits(P, CORRUPT, lambda n, v: seen.get(n, v)))


@pytest.mark.many
@pytest.mark.parametrize("frozen", [None, "*/attn", ("*/attn", "*/mlp")], ids=str)
def test_path_patching_from_sender_to_receiver(frozen):
    both = (P, CLEAN), (P, CORRUPT)
    senders = ["0/attn", "0/mlp", "1/mlp"]
    got = attribute.path_patching(
        marked, *both, senders, "2/attn", range(LENGTH), frozen=frozen, batch_size=2
    )
    parts = [p[2:] for p in np.atleast_1d(frozen)] if frozen else []
    held = tuple(f"{i}/{part}" for i in range(LAYERS) for part in parts)
    want = [[path_by_hand(s, "2/attn", i, held) for i in range(LENGTH)] for s in senders]
    close(got, want)


def test_receivers_are_each_reached_directly():
    """The path to a receiver excludes the effect of other receivers."""

    def f(x, hook=sow):
        a = hook("a", x)
        b = hook("b", 2 * a)
        c = hook("c", a * b)
        return (b + 10 * c).sum()

    one, zero = 3 * jnp.ones((1, 1)), jnp.ones((1, 1))
    got = attribute.path_patching(f, one, zero, "a", ["b", "c"])
    close(got, [6.0 + 10 * 3.0 * 2.0])


@pytest.mark.many
def test_paths_in_a_scan():
    both = (P, CLEAN), (P, CORRUPT)
    want = attribute.path_patching(
        marked, *both, "0/mlp", "2/attn", [1], frozen=("*/attn", "*/mlp")
    )
    got = attribute.path_patching(
        scanned,
        *both,
        tapax.at("mlp", step=0),
        tapax.at("attn", step=2),
        [1],
        frozen=("attn", "mlp"),
    )
    close(got, want)


def test_without_a_path_there_is_no_effect():
    got = attribute.path_patching(marked, (P, CLEAN), (P, CORRUPT), "2/mlp", "0/attn")
    close(got, [difference(logits(P, CORRUPT))])


SWEEP = (marked, (P, CLEAN), (P, CORRUPT))
WRONG = {
    "an unknown site": (SWEEP, {"sites": ["0/mpl"]}, tapax.SiteError, "nearest names are '0/mlp'"),
    "a glob of nothing": (SWEEP, {"sites": "nothing/*"}, tapax.SiteError, "nothing"),
    "no sites": (SWEEP, {"sites": []}, tapax.SiteError, "picks no site"),
    "a position out of range": (
        SWEEP, {"sites": ["0/mlp"], "positions": [LENGTH]}, tapax.SiteError,
        r"The position 4 is out of range: the site '0/mlp', marked at .*test_patching.py:\d+, has "
        r"values of shape \[1, 4, 4\], so 4 positions along axis -2",
    ),
    "an axis there is not": (
        SWEEP, {"sites": ["0/mlp"], "positions": [0], "axis": 3}, tapax.SiteError,
        "have no such axis",
    ),
    "positions that are not integers": (
        SWEEP, {"sites": ["0/mlp"], "positions": [0.5]}, TypeError, "one or more integers"
    ),
    "no positions": (SWEEP, {"sites": "0/mlp", "positions": []}, TypeError, "one or more integers"),
    "other shapes": (
        (marked, (P, CLEAN), (P, CORRUPT[:, :3])), {"sites": ["0/mlp"]}, ValueError,
        r"argument 1 has the shape \[1, 4\] in one and \[1, 3\] in the other",
    ),
    "another structure": (
        (marked, (P, CLEAN), (CORRUPT,)), {"sites": ["0/mlp"]}, ValueError, "the same structure"
    ),
    "a metric that is not an array": (
        (lambda p, t: {"loss": marked(p, t)}, (P, CLEAN), (P, CORRUPT)), {"sites": ["0/mlp"]},
        TypeError, "one array, but returns dict",
    ),
    "a step out of range": (
        (scanned, (P, CLEAN), (P, CORRUPT)), {"sites": tapax.at("mlp", step=3)}, tapax.SiteError,
        "loop of 3 iterations",
    ),
    "a step without a loop": (
        SWEEP, {"sites": tapax.at("0/mlp", step=0)}, tapax.SiteError, "no loop"
    ),
    "a value that is not used": (
        (lambda x: (tapax.sow(x, "h"), x.sum())[1], P["embed"], P["embed"]), {"sites": ["h"]},
        tapax.SiteError, "Use the value that tapax.sow returns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=str)
@both_methods
def test_bad_input_of_patching_methods(method, case):
    args, options, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        method(*args, **options)


def test_a_sender_that_receives():
    with pytest.raises(tapax.SiteError, match="both a sender and a receiver"):
        attribute.path_patching(*SWEEP, "0/mlp", "*/mlp")


def test_parts_of_values_are_refused():
    part = tapax.at("h", index=0)
    f = lambda x: (tapax.sow(3 * x, "h") ** 2).sum()
    with pytest.raises(tapax.SiteError, match=r"needs whole values\. Leave `index` out"):
        tapax.attribute.saliency(f, part)(jnp.ones(3))
