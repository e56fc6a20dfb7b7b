"""Statistics of every layer's value and gradient: tapax and PyTorch's hooks, in one run.

    PYTHONPATH=. python -m benchmarks.peers.torch_hooks [--rounds N] [--json PATH] [--tiny]

The model is that of `benchmarks.statistics`: a GPT of 24 blocks of width 2048, 8 x 1024 tokens,
bfloat16, each block recomputed in the backward pass, trained by plain gradient descent. Its sites
are the seven of a block. PyTorch runs it eagerly, with a forward hook on each site that reduces the
value and hooks the tensor for its gradient. Results stay on the device until the step ends. One
process runs both libraries in turns, on one device, and each has half of the memory.

The script needs torch as well as jax. On a CPU, or with `--tiny`, the model is small.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Both libraries would take the whole memory of a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.45")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tapax
from benchmarks import gpt, measure, statistics
from benchmarks.gpt import Config
from benchmarks.gpu import LARGE, TINY
from benchmarks.measure import Result, build, race

LOW, HIGH = -14, 12
SITES = ("norm1", "qkv", "attn", "norm2", "up", "mlp", "out")
Step = Callable[[], Any]


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Residual(nn.Module):
    """The sum of the stream and what a layer adds, as a module so that it can be hooked."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Block(nn.Module):
    """The block of `benchmarks.statistics`, with a module for each site."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype, device: str):
        super().__init__()
        made: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
        self.heads = heads
        self.norm1, self.norm2, self.out = Norm(), Norm(), Residual()
        self.qkv = nn.Linear(width, 3 * width, **made)
        self.attn = nn.Linear(width, width, **made)
        self.up = nn.Linear(width, 4 * width, **made)
        self.mlp = nn.Linear(4 * width, width, **made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn(mixed.transpose(1, 2).reshape(x.shape))
        return self.out(x, self.mlp(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Model(nn.Module):
    def __init__(self, params: Any, cfg: Config, device: str):
        super().__init__()
        dtype = torch.bfloat16 if cfg.dtype == jnp.bfloat16 else torch.float32

        def tensor(x: Any) -> torch.Tensor:
            return torch.from_numpy(np.array(x, np.float32)).to(device, dtype)

        self.embed, self.place, self.head = (
            nn.Parameter(tensor(params[name])) for name in ("embed", "place", "head")
        )
        self.norm = Norm()
        self.blocks = nn.ModuleList(
            Block(cfg.width, cfg.heads, dtype, device) for _ in range(cfg.layers)
        )
        names = {"qkv": "qkv", "proj": "attn", "up": "up", "down": "mlp"}
        with torch.no_grad():
            for block, given in zip(self.blocks, params["blocks"], strict=True):
                for name, layer in names.items():
                    getattr(block, layer).weight.copy_(tensor(given[name]).T)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed[tokens[:, :-1]] + self.place
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = (self.norm(x) @ self.head).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rms(x: torch.Tensor) -> torch.Tensor:
    return x.float().square().mean().sqrt()


def histogram(x: torch.Tensor) -> torch.Tensor:
    """Counts of magnitudes between powers of two, by their exponents.

    `histc` does not wait for the device, as `bincount` does to learn the number of bins.
    """
    exponent = torch.frexp(x.float()).exponent - 1
    last = HIGH - LOW + 1
    place = (exponent - LOW + 1).clamp_(0, last).masked_fill_(x == 0, 0)
    return torch.histc(place.float(), bins=last + 1, min=-0.5, max=last + 0.5)


REDUCERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"rms": rms, "histogram": histogram}


class Hooks:
    """Statistics of the values and gradients of all sites, by hooks."""

    def __init__(self, model: Model, reduce: Callable[[torch.Tensor], torch.Tensor]):
        self.found: dict[str, torch.Tensor] = {}
        self._reduce = reduce
        self._handles = [
            getattr(block, site).register_forward_hook(self._hook(f"block{i}/{site}"))
            for i, block in enumerate(model.blocks)
            for site in SITES
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, value: torch.Tensor) -> None:
            del module, args
            # A recomputed block calls its hooks once more. Gradients flow through the first pass.
            if f"{name}.value" not in self.found:
                self.found[f"{name}.value"] = self._reduce(value.detach())
                value.register_hook(lambda grad: self._see_gradient(name, grad))

        return see

    def _see_gradient(self, name: str, grad: torch.Tensor) -> None:
        self.found[f"{name}.grad"] = self._reduce(grad)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def torch_step(model: Model, tokens: torch.Tensor, name: str) -> Step:
    """A train step of PyTorch, plain or with the statistics of this name."""

    def step() -> Any:
        hooks = Hooks(model, REDUCERS[name]) if name != "plain" else None
        loss = model(tokens)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.01 * p.grad)
                p.grad = None
        found = {} if hooks is None else hooks.found
        if hooks is not None:
            hooks.remove()
            assert len(found) == 2 * len(SITES) * len(model.blocks), len(found)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return loss.item(), found

    return step


def tapax_steps(cfg: Config, form: str, names: Sequence[str]) -> dict[str, Step]:
    """The train steps of JAX in one form of the model, each with separate parameters."""
    make = getattr(statistics, form)
    args = cfg.arguments(stacked=form == "scanned")
    marked = gpt.train_step(make(cfg, tapax))
    steps: dict[str, Any] = {}
    for name in names:
        if name == "plain":
            steps[name] = gpt.train_step(make(cfg, gpt.Bare()))
        else:
            asked = {"**": statistics.STATISTICS[name]}
            steps[name] = tapax.capture(marked, values=asked, grads=asked)

    def runner(name: str, program: Any) -> Step:
        state = [jax.tree.map(jnp.copy, args[0])]

        def step() -> Any:
            out = program(state[0], args[1])
            (state[0], loss), *rest = (out,) if name == "plain" else out
            return jax.block_until_ready((loss, *rest))

        return step

    return {name: runner(name, build(step, *args, donate=(0,))) for name, step in steps.items()}


def check_statistics(cfg: Config, device: str) -> None:
    """Raise unless both libraries find the same statistics of a small model."""
    model = Model(cfg.arguments()[0], cfg, device)
    tokens = torch.from_numpy(np.array(cfg.arguments()[1], np.int64)).to(device)
    theirs = torch_step(model, tokens, "rms")()[1]
    ours = tapax_steps(cfg, "unrolled", ["rms"])["rms"]()[1]
    for i in range(cfg.layers):
        for site in SITES:
            name = f"block{i}/{site}"
            for kind, found in (("value", ours.values), ("grad", ours.grads)):
                a, b = float(found[name]), float(theirs[f"{name}.{kind}"])
                if not abs(a - b) <= 0.1 * abs(a):
                    raise SystemExit(f"The rms of the {kind} of {name} is {a:.4g}, but {b:.4g}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.torch_hooks", description="Statistics, by hooks and by us."
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument(
        "--tiny", action="store_true", help="a toy size, to try the script anywhere"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    cfg = LARGE if device == "cuda" else TINY
    check_statistics(TINY, device)

    model = Model(cfg.arguments()[0], cfg, device)
    tokens = torch.from_numpy(np.array(cfg.arguments()[1], np.int64)).to(device)
    names = ("plain", *REDUCERS)
    steps = {f"torch {name}": torch_step(model, tokens, name) for name in names}
    for form in ("scanned", "unrolled"):
        steps |= {f"{form} {name}": step for name, step in tapax_steps(cfg, form, names).items()}
    times = race(steps, options.rounds)
    results = [
        Result.timed(library, f"{name} of everything, over plain", times, f"{library} {name}", base)
        for library in ("torch", "scanned", "unrolled")
        for base in [f"{library} plain"]
        for name in REDUCERS
    ]
    print(f"torch {torch.__version__}, {cfg.layers} blocks of width {cfg.width}")
    measure.show(results)
    if options.json:
        options.json.write_text(json.dumps([r.record() for r in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
