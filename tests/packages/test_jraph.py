"""Graph networks of jraph, with Haiku and with Linen layers."""

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
import pytest
from flax import linen as nn

import tapax
from tests.oracles import by_hand, hooks
from tests.oracles.closeness import assert_close

KEY = jax.random.key(0)
SENDERS, RECEIVERS = np.array([0, 1, 2, 3, 0]), np.array([1, 2, 0, 4, 4])


@pytest.fixture(scope="module")
def graph():
    """Batch two graphs with three and two nodes into one."""
    k = jax.random.split(KEY, 3)
    return jraph.GraphsTuple(
        nodes=jax.random.normal(k[0], (5, 3)),
        edges=jax.random.normal(k[1], (5, 2)),
        globals=jax.random.normal(k[2], (2, 1)),
        senders=jnp.array(SENDERS),
        receivers=jnp.array(RECEIVERS),
        n_node=jnp.array([3, 2]),
        n_edge=jnp.array([3, 2]),
    )


def network(mark=by_hand.unmarked):
    """Run two rounds of message passing."""

    def forward(graph):
        for i in range(2):

            @jraph.concatenated_args
            def edge(x, i=i):
                return mark(jax.nn.tanh(hk.Linear(2, name=f"edge{i}")(x)), "message")

            @jraph.concatenated_args
            def node(x, i=i):
                return mark(jnp.sqrt(1 + hk.Linear(3, name=f"node{i}")(x) ** 2), "node")

            glob = jraph.concatenated_args(hk.Linear(1, name=f"global{i}"))
            graph = jraph.GraphNetwork(edge, node, glob)(graph)
        return graph

    return hk.without_apply_rng(hk.transform(forward))


def loss_of(params, graph, mark=by_hand.unmarked):
    out = network(mark).apply(params, graph)
    return jnp.mean(out.globals**2) + jnp.mean(out.nodes**2)


def train_step(mark=by_hand.unmarked):
    def step(params, state, graph):
        loss, grads = jax.value_and_grad(loss_of)(params, graph, mark)
        updates, state = optax.adam(1e-2).update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step)


@pytest.fixture(scope="module")
def start(graph):
    params = network().init(KEY, graph)
    return params, optax.adam(1e-2).init(params), graph


def rounds_in_numpy(params, graph):
    """Compute the values of both rounds, edge by edge and node by node."""
    weigh = lambda name, x: x @ params[name]["w"] + params[name]["b"]
    nodes, edges, glob = (np.asarray(x) for x in (graph.nodes, graph.edges, graph.globals))
    part = np.array([0, 0, 0, 1, 1])  # the graph of every node and every edge
    values = {}
    for i in range(2):
        inputs = [
            np.concatenate([edges[e], nodes[s], nodes[r], glob[part[e]]])
            for e, (s, r) in enumerate(zip(SENDERS, RECEIVERS, strict=True))
        ]
        edges = np.tanh(weigh(f"edge{i}", np.stack(inputs)))
        sums = lambda ends, edges=edges: np.stack([edges[ends == n].sum(0) for n in range(5)])
        inputs = np.concatenate([nodes, sums(SENDERS), sums(RECEIVERS), glob[part]], axis=1)
        nodes = np.sqrt(1 + weigh(f"node{i}", inputs) ** 2)
        inputs = [
            np.concatenate([nodes[part == g].sum(0), edges[part == g].sum(0), glob[g]])
            for g in (0, 1)
        ]
        glob = weigh(f"global{i}", np.stack(inputs))
        number = f"@{i}" if i else ""
        values |= {f"message{number}": edges, f"node{number}": nodes}
    return values


@pytest.mark.many
def test_captured_graph_network_step_is_the_plain_step(start):
    out, taps = tapax.capture(train_step(tapax.sow))(*start)
    assert_close(out, train_step()(*start))
    values = rounds_in_numpy(start[0], start[2])
    assert_close({name: taps.values[name] for name in values}, values)
    params, _, graph = start
    expected = by_hand.gradients(lambda mark: loss_of(params, graph, mark), values)
    assert_close({name: taps.grads[name] for name in values}, expected)


def test_modules_in_update_functions_have_their_haiku_names(start):
    params, _, graph = start
    values, grads = hooks.of_haiku().grads(lambda: loss_of(params, graph))
    _, taps = tapax.capture(train_step())(*start)
    assert set(values) == {s.name for s in taps.sites} == set(params)
    assert_close(dict(taps.values), values)
    assert_close(dict(taps.grads), grads)


def test_edit_of_a_message_changes_the_train_step(start):
    change = lambda x: x.at[2].set(0.0)
    edited = tapax.edit(train_step(tapax.sow), values={"message@1": change})(*start)
    rounds = iter([by_hand.unmarked, lambda x, name: change(x)])
    mark = lambda x, name: next(rounds)(x, name) if name == "message" else x
    assert_close(edited, train_step(mark)(*start))
    assert not np.allclose(edited[2], train_step()(*start)[2])


def test_monitored_graph_network_goes_the_plain_way(start, tmp_path):
    state, plain = start[:2], start[:2]
    with tapax.monitor(train_step(tapax.sow), every=1, to=tmp_path / "run.jsonl") as step:
        for _ in range(2):
            state, plain = step(*state, start[2])[:2], train_step()(*plain, start[2])[:2]
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)
    log = tapax.open(tmp_path / "run.jsonl")
    first = rounds_in_numpy(start[0], start[2])["message@1"]
    assert_close(log["message@1/value_rms"].values[0], np.sqrt(np.mean(first**2)))


def test_search_finds_the_round_and_the_node_of_a_nan(start):
    assert tapax.find_nonfinite(train_step(tapax.sow))(*start) is None
    sign = jnp.ones((5, 1)).at[3].set(-1.0)
    broken = lambda x, name: jnp.log(x * sign) if name == "node" else x  # every node is above 1
    found = tapax.find_nonfinite(train_step(broken))(*start)
    assert (found.operation, found.kind, found.phase) == ("log", "nan", "forward")
    assert (found.index, found.count, found.shape) == ((3, 0), 3, (5, 3))


class Attention(nn.Module):
    """A graph attention layer, then a graph convolution."""

    @nn.compact
    def __call__(self, graph):
        query = nn.Dense(4, name="query")
        logit = nn.Dense(1, name="logit")
        attend = lambda sent, received, edges: logit(jnp.concatenate([sent, received, edges], -1))
        graph = jraph.GAT(query, attend)(graph)
        return jraph.GraphConvolution(nn.Dense(2, name="out"), add_self_edges=True)(graph)


def test_graph_attention_of_linen_layers_agrees_with_interceptors(graph):
    net = Attention()
    variables = net.init(KEY, graph)
    loss = lambda variables: jnp.mean(net.apply(variables, graph).nodes ** 2)
    values, grads = hooks.of_linen("Attention").grads(lambda: loss(variables))
    out, taps = tapax.capture(jax.jit(jax.value_and_grad(loss)))(variables)
    assert_close(out, jax.value_and_grad(loss)(variables))
    assert_close(dict(taps.values), values)
    layers = ["Attention/query", "Attention/logit", "Attention/out", "Attention:nodes"]
    assert sorted(taps.grads) == sorted(layers)  # the loss does not depend on the rest
    assert_close(dict(taps.grads), {name: grads[name] for name in layers})
