"""The patching sweep in PyTorch: by TransformerLens and by nnsight, each in every way it offers.

python benchmarks/peers/patching_torch.py --weights weights.npz --tokens tokens.npz --out out.npz

For every layer and position, the script runs the corrupt prompt with the stream after that block,
at that position, replaced by its value in the clean run. The metric is the difference of two logits
at the last position. The weights are those of `benchmarks.gpt2`; tokens.npz has the prompts `clean`
and `corrupt` and the two `answers`.

out.npz has `logits` of both prompts, and for each way its result, a row for each of `layers/...`,
and its `seconds/...`, the median of the rounds. A way that would take longer than `--limit` runs on
layers spread evenly from the first to the last. Its time is scaled to all layers, because the time
of a layer is constant or linear in its depth.

With `--serve` another process orders the rounds: each line of input names a way, and the script
answers with the seconds that it took. It writes out.npz when the input ends.

It needs torch, transformers, transformer_lens >= 4 and nnsight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nnsight
import numpy as np
import torch
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

Arrays = Mapping[str, np.ndarray]
Sweep = Callable[[Sequence[int]], torch.Tensor]

TOLERANCE = 1e-4
# As little as the metric needs: the logits of the last position, and no keys kept for decoding.
LEAN = {"logits_to_keep": 1, "use_cache": False}
MODULES = {
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "proj": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
LEAVES = {"w": "weight", "b": "bias", "scale": "weight", "shift": "bias"}


def translate(name: str) -> str:
    """Return the name of a parameter in transformers."""
    match name.split("/"):
        case ["embed"]:
            return "transformer.wte.weight"
        case ["place"]:
            return "transformer.wpe.weight"
        case ["norm", leaf]:
            return f"transformer.ln_f.{LEAVES[leaf]}"
        case ["blocks", layer, module, leaf]:
            return f"transformer.h.{layer}.{MODULES[module]}.{LEAVES[leaf]}"
    raise ValueError(f"Unknown parameter {name!r}.")


def load(weights: Arrays) -> GPT2LMHeadModel:
    vocab, width = weights["embed"].shape
    state = {translate(k): torch.from_numpy(v) for k, v in weights.items() if k != "heads"}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=len(weights["place"]),
        n_embd=width,
        n_layer=1 + max(int(k.split("/")[1]) for k in weights if k.startswith("blocks/")),
        n_head=int(weights["heads"]),
    )
    model = GPT2LMHeadModel(config)
    model.load_state_dict(state)
    return model.eval()


class Prompts:
    def __init__(self, tokens: Arrays) -> None:
        self.clean, self.corrupt = (
            torch.from_numpy(tokens[k].astype(np.int64))[None] for k in ("clean", "corrupt")
        )
        self.right, self.wrong = (int(i) for i in tokens["answers"])
        self.places = range(self.corrupt.shape[1])
        self.every = torch.arange(len(self.places))
        self.batch = self.corrupt.expand(len(self.places), -1)

    def metric(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, self.right] - logits[:, -1, self.wrong]


def lens(model: Any, prompts: Prompts) -> dict[str, Sweep]:
    """TransformerLens: hooks on `hook_resid_post`.

    Its `start_at_layer` would run the blocks before that layer, too.
    """

    def site(layer: int) -> str:
        return f"blocks.{layer}.hook_resid_post"

    def clean() -> Any:
        return model.run_with_cache(
            prompts.clean, names_filter=lambda name: name.endswith("hook_resid_post")
        )[1]

    def patch(clean: torch.Tensor, rows: Any, places: Any) -> Callable[..., torch.Tensor]:
        def hook(x: torch.Tensor, hook: Any) -> torch.Tensor:
            x[rows, places] = clean[0, places]
            return x

        return hook

    def pairs(layers: Sequence[int], **options: Any) -> torch.Tensor:
        cache, rows = clean(), []
        for layer in layers:
            row = []
            for place in prompts.places:
                hooks = [(site(layer), patch(cache[site(layer)], 0, place))]
                logits = model.run_with_hooks(prompts.corrupt, fwd_hooks=hooks, **options)
                row.append(prompts.metric(logits))
            rows.append(torch.cat(row))
        return torch.stack(rows)

    def batched(layers: Sequence[int]) -> torch.Tensor:
        cache, rows = clean(), []
        for layer in layers:
            hooks = [(site(layer), patch(cache[site(layer)], prompts.every, prompts.every))]
            logits = model.run_with_hooks(prompts.batch, fwd_hooks=hooks, **LEAN)
            rows.append(prompts.metric(logits))
        return torch.stack(rows)

    return {
        "TransformerLens, by pair": pairs,
        "TransformerLens, by pair, lean": lambda layers: pairs(layers, **LEAN),
        "TransformerLens, by layer": batched,
    }


def sight(model: Any, prompts: Prompts) -> dict[str, Sweep]:
    """nnsight: a trace that sets the output of a block."""
    blocks = model.transformer.h

    def residuals(tokens: torch.Tensor) -> list[torch.Tensor]:
        with model.trace(tokens, **LEAN):
            found = nnsight.save([block.output for block in blocks])
        return found  # noqa: RET504 (a trace cannot be returned from)

    def pairs(layers: Sequence[int], **options: Any) -> torch.Tensor:
        clean, rows = residuals(prompts.clean), []
        for layer in layers:
            row = []
            for place in prompts.places:
                with model.trace(prompts.corrupt, **options):
                    blocks[layer].output[:, place] = clean[layer][:, place]
                    logits = model.output.logits.save()
                row.append(prompts.metric(logits))
            rows.append(torch.cat(row))
        return torch.stack(rows)

    def batched(layers: Sequence[int]) -> torch.Tensor:
        clean, rows = residuals(prompts.clean), []
        for layer in layers:
            with model.trace(prompts.batch, **LEAN):
                blocks[layer].output[prompts.every, prompts.every] = clean[layer][0]
                logits = model.output.logits.save()
            rows.append(prompts.metric(logits))
        return torch.stack(rows)

    def resumed(layers: Sequence[int]) -> torch.Tensor:
        clean, corrupt, rows = residuals(prompts.clean), residuals(prompts.corrupt), []
        for layer in layers:
            x = corrupt[layer].repeat(len(prompts.places), 1, 1)
            x[prompts.every, prompts.every] = clean[layer][0]
            with model.trace(prompts.batch, **LEAN):
                for block in blocks[: layer + 1]:
                    block.skip(x)
                logits = model.output.logits.save()
            rows.append(prompts.metric(logits))
        return torch.stack(rows)

    return {
        "nnsight, by pair": pairs,
        "nnsight, by pair, lean": lambda layers: pairs(layers, **LEAN),
        "nnsight, by layer": batched,
        "nnsight, by layer, skipping": resumed,
    }


def timed(sweep: Sweep, layers: Sequence[int]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    result = sweep(layers)
    return time.perf_counter() - start, result


def choose(sweep: Sweep, depth: int, limit: float) -> Sequence[int]:
    """Return all layers or, if they exceed the limit, fewer layers at even distances."""
    fits = int(limit / timed(sweep, [depth // 2])[0])
    if fits >= depth:
        return range(depth)
    return sorted({round(i) for i in np.linspace(0, depth - 1, max(2, fits))})


def require_close(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    distance = float((actual - expected).abs().max())
    if not distance <= TOLERANCE:
        raise AssertionError(f"{what} differs by {distance:.1e} (allowed {TOLERANCE:.1e}).")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=180, help="seconds for one sweep")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append", help="this way; repeatable")
    parser.add_argument("--serve", action="store_true", help="time what standard input names")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    with np.load(options.weights) as file:
        weights = dict(file)
    with np.load(options.tokens) as file:
        prompts = Prompts(dict(file))

    model, wrapped = load(weights), load(weights)
    depth = model.config.n_layer
    bridge = build_bridge_from_module(wrapped, "GPT2LMHeadModel", hf_config=wrapped.config).eval()
    traced = nnsight.NNsight(model)

    both = torch.cat([prompts.clean, prompts.corrupt])
    expected = model(both).logits
    require_close("TransformerLens", bridge(both), expected)
    with traced.trace(both):
        logits = traced.output.logits.save()
    require_close("nnsight", logits, expected)

    ways = lens(bridge, prompts) | sight(traced, prompts)
    ways = {k: v for k, v in ways.items() if not options.only or k in options.only}
    layers = {name: choose(sweep, depth, options.limit) for name, sweep in ways.items()}
    found: dict[str, np.ndarray] = {"logits": expected.numpy()}

    if options.serve:
        # The ways, and on what share of the layers each is timed.
        print(json.dumps({k: len(v) / depth for k, v in layers.items()}), flush=True)
        for line in sys.stdin:
            name = line.strip()
            taken, result = timed(ways[name], layers[name])
            found |= {name: result.numpy(), f"layers/{name}": np.asarray(layers[name])}
            print(taken * depth / len(layers[name]), flush=True)
        np.savez(options.out, **found)  # pyright: ignore[reportArgumentType]
        return

    times: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, torch.Tensor] = {}
    for turn in range(options.rounds):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            taken, results[name] = timed(ways[name], layers[name])
            times[name].append(taken * depth / len(layers[name]))
    known: dict[int, torch.Tensor] = {}
    for name, result in results.items():
        for layer, row in zip(layers[name], result, strict=True):
            require_close(f"{name}, at layer {layer},", row, known.setdefault(layer, row))
        found[name] = result.numpy()
        found[f"layers/{name}"] = np.asarray(layers[name])
        found[f"seconds/{name}"] = np.asarray(statistics.median(times[name]))
        scaled = "" if len(layers[name]) == depth else f"  from {len(layers[name])} layers"
        print(f"{name:34} {found[f'seconds/{name}']:9.3f} s{scaled}", flush=True)
    np.savez(options.out, **found)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
