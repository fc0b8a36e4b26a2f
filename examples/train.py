"""Trains a small mixture-of-experts language model on Shakespeare, byte by byte.

    python examples/train.py            # or: make train

One jitted, donated step: packed sequences with segment ids and positions, attention and experts
through pallas_ops, AdamW with warmup and cosine decay. The default run (2 M parameters, 0.9 M bytes
of text) takes the held-out loss from 5.96 to 1.69 nats a byte, in two to three minutes on two CPU
cores, and writes losses.csv, loss.png, result.json and sample.txt to runs/train/.
"""

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from data import VOCAB, batches, decode, encode, read_corpus, split_documents
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

from flax_modules import DecoderConfig, DecoderLM


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the training run."""

    text: Path | None = None
    """A text file of your own to train on, instead of a corpus."""
    corpus: Literal["shakespeare", "pydoc"] = "shakespeare"
    """Shakespeare's works (5 MB), or Python's own reference (0.5 MB, in the standard library)."""
    out: Path = Path("runs/train")
    """Folder for the losses, the loss curve and the sample."""
    seed: int = 0
    """Seed of parameters, data order and sample; the same seed gives the same run."""

    steps: int = 900
    """Optimizer steps."""
    steps_per_call: int = 1
    """Steps in one compiled call (a lax.scan); changes the speed and no bit of the result."""
    batch: int = 8
    """Sequences in a batch."""
    length: int = 128
    """Tokens in a sequence."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    warmup: int = 50
    """Steps of linear warmup, before the cosine decay to a tenth of the peak."""
    weight_decay: float = 0.1
    """Decay of matrices, times the learning rate."""
    clip: float = 1.0
    """Largest global norm of the gradient."""
    balance: float = 0.01
    """Factor of the load-balance loss."""
    eval_every: int = 150
    """Steps between evaluations."""
    eval_batches: int = 40
    """Batches of held-out text in an evaluation."""

    layers: int = 3
    """Blocks."""
    features: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads."""
    hidden: int = 192
    """Width of each expert (of the MLP, if there are no experts)."""
    experts: int = 8
    """Experts in a block; 0 for a dense MLP."""
    experts_per_token: int = 2
    """Experts that each token goes to."""
    remat: bool = False
    """Save memory: recompute each block in the backward pass, all but its attention."""

    prompt: str = "ROMEO.\n"
    """Text that the sample goes on from."""
    sample: int = 400
    """Bytes of text to generate at the end."""
    temperature: float = 0.7
    """Temperature of the sample; 0 takes the most likely byte."""


def parse(args: list[str] | None) -> Config:
    """Command line to options; what is wrong with them becomes one line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            config = tyro.cli(Config, args=args, description=__doc__)
    except SystemExit as stop:
        if not stop.code:
            raise
        # tyro draws a box; its first paragraph says what is wrong.
        lines = [line.strip("│ ") for line in errors.getvalue().splitlines()[1:]]
        message = itertools.takewhile(lambda line: line.strip("─"), lines)
        fail(" ".join(message) + " (see --help)")
    for name, value in dataclasses.asdict(config).items():
        least = 0 if name in ("seed", "warmup", "weight_decay", "balance", "experts") else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if isinstance(value, float) and not 0 <= value < float("inf"):
            fail(f"--{name.replace('_', '-')} must be finite and not negative, got {value}")
    return config


def fail(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


def load_documents(config: Config) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Documents to train on and documents held out, every twentieth."""
    try:
        texts = [config.text.read_bytes()] if config.text else read_corpus(config.corpus)
    except OSError as error:
        fail(f"cannot read --text {config.text}: {error.strerror}" if config.text else str(error))
    documents = split_documents(texts)
    train = [d for i, d in enumerate(documents) if i % 20 != 10]
    held_out = documents[10::20]
    for part, name in (train, "training"), (held_out, "held-out"):
        tokens, needed = sum(len(d) - 1 for d in part), config.batch * config.length
        if tokens < needed:
            fail(
                f"the {name} text has {tokens} bytes, and one batch of --batch {config.batch} x "
                f"--length {config.length} needs {needed}"
            )
    return train, held_out


def stack(some: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *some)


OPTIONS = {
    "num_kv_heads": "--kv-heads",
    "num_heads": "--heads",
    "experts_per_token": "--experts-per-token",
    "num_experts": "--experts",
    "head_dim": "--features / --heads",
}


def make_model(config: Config) -> DecoderLM:
    shape = DecoderConfig(
        vocab_size=VOCAB,
        num_layers=config.layers,
        features=config.features,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        hidden_features=config.hidden,
        num_experts=config.experts,
        experts_per_token=config.experts_per_token,
        remat=config.remat,
    )
    try:
        return DecoderLM(shape, rngs=nnx.Rngs(config.seed))
    except ValueError as error:  # it names the model's options, not the program's
        message = str(error)
        for name, option in OPTIONS.items():
            message = message.replace(name, option)
        fail(message)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.steps, config.warmup + 1),
        end_value=config.learning_rate / 10,
    )
    decayed = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay, mask=decayed),
    )


def make_functions(graphdef: Any, optimizer: optax.GradientTransformation, config: Config):
    """The three compiled functions of the run: train, evaluate, generate."""

    def losses(params, batch):
        """Mean cross-entropy in nats a byte, and the load-balance loss."""
        model = nnx.merge(graphdef, params)
        output = model(batch["inputs"], batch["positions"], batch["segment_ids"])
        loss = optax.softmax_cross_entropy_with_integer_labels(output.logits, batch["targets"])
        real = batch["segment_ids"] != 0
        loss = jnp.sum(jnp.where(real, loss, 0.0)) / jnp.maximum(1, real.sum())
        return loss, output.load_balance_loss

    def train_step(state, batch):
        def objective(params):
            loss, balance = losses(params, batch)
            return loss + config.balance * balance, loss

        params, moments = state
        grads, loss = jax.grad(objective, has_aux=True)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, batches, real):  # leaves [steps_per_call, batch, length], [steps_per_call]
        # A branch is compiled apart from what is around it, so that a step has the same bits in a
        # loop of one (which XLA unrolls) and of many. It also lets the last call be a short one.
        def step_or_skip(state, batch_real):
            batch, real = batch_real
            return jax.lax.cond(real, train_step, lambda state, _: (state, jnp.nan), state, batch)

        return jax.lax.scan(step_or_skip, state, (batches, real))

    @jax.jit
    def evaluate(params, batches):  # leaves [eval_batches, batch, length]
        return jax.lax.map(lambda batch: losses(params, batch)[0], batches).mean()

    @functools.partial(jax.jit, static_argnums=3)
    def generate(params, prompt, size, steps, key):
        """Continues `prompt [length]`, of which the first `size` are given, by `steps` bytes."""
        model = nnx.merge(graphdef, params)

        def step(carry, key):
            window, size = carry
            logits = model(window[None]).logits[0, size - 1]
            token = jax.random.categorical(key, logits / max(config.temperature, 1e-6)).astype(
                window.dtype
            )
            # A full window moves on by one.
            window = jnp.where(size < config.length, window, jnp.roll(window, -1))
            size = jnp.minimum(size + 1, config.length)
            return (window.at[size - 1].set(token), size), token

        return jax.lax.scan(step, (prompt, size), jax.random.split(key, steps))[1]

    return train, evaluate, generate


def plot(path: Path, train: list, held_out: list):
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="cross-entropy (nats a byte)")
    axes.plot(
        *zip(*train, strict=True), color="tab:blue", alpha=0.4, linewidth=0.8, label="training"
    )
    axes.plot(
        *zip(*held_out, strict=True), "o-", color="tab:orange", markersize=4, label="held out"
    )
    axes.set_title(f"held out, at the end: {held_out[-1][1]:.3f}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main(args: list[str] | None = None) -> float:
    """Runs the program; returns the last loss on held-out text."""
    start = time.perf_counter()
    config = parse(args)
    train_documents, held_out_documents = load_documents(config)
    packed = functools.partial(batches, batch=config.batch, length=config.length)
    train_batches = packed(train_documents, seed=config.seed)
    held_out = stack(itertools.islice(packed(held_out_documents, seed=None), config.eval_batches))

    graphdef, params = nnx.split(make_model(config))
    optimizer = make_optimizer(config)
    state = (params, optimizer.init(params))
    train, evaluate, generate = make_functions(graphdef, optimizer, config)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    text_size = sum(map(len, train_documents))
    print(
        f"{parameters / 1e6:.2f} M parameters, {text_size / 1e6:.2f} MB of text, "
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
    )
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        log = (config.out / "losses.csv").open("w", newline="")
    except OSError as error:
        fail(f"cannot write to --out {config.out}: {error.strerror}")

    losses, held_out_losses = [], []
    bar = tqdm(
        total=config.steps,
        unit="step",
        desc="compiling",
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else 15,  # seconds between lines of a log
    )
    with log, bar:
        rows = csv.writer(log)
        rows.writerow(["step", "split", "loss"])

        def evaluate_now(step: int):
            loss = float(evaluate(state[0], held_out))
            held_out_losses.append((step, loss))
            rows.writerow([step, "held out", loss])
            log.flush()
            bar.write(f"step {step:5d}   held-out loss {loss:.4f}")

        evaluate_now(0)
        for step in range(0, config.steps, config.steps_per_call):
            size = min(config.steps_per_call, config.steps - step)
            since = time.perf_counter()
            chunk = list(itertools.islice(train_batches, size))
            chunk += chunk[-1:] * (config.steps_per_call - size)
            state, chunk_losses = train(state, stack(chunk), np.arange(len(chunk)) < size)
            for i, loss in enumerate(np.asarray(chunk_losses)[:size].tolist(), start=step + 1):
                losses.append((i, loss))
                rows.writerow([i, "training", loss])
            progress = f"loss {losses[-1][1]:.3f}"
            if step == 0:  # its time went into compiling
                bar.reset()
                bar.set_description("training", refresh=False)
            else:
                rate = size * config.batch * config.length / (time.perf_counter() - since)
                progress += f", {rate:,.0f} tokens/s"
            bar.set_postfix_str(progress, refresh=False)
            bar.update(size)
            done = step + size
            if done // config.eval_every > step // config.eval_every or done == config.steps:
                evaluate_now(done)

    prompt = encode(config.prompt)[-config.length :].astype(np.int32)
    window = np.pad(prompt, (0, config.length - len(prompt)))
    key = jax.random.key(config.seed)
    sample = config.prompt + decode(generate(state[0], window, len(prompt), config.sample, key))
    print(f"\n{sample}\n")
    (config.out / "sample.txt").write_text(sample, encoding="utf-8")
    plot(config.out / "loss.png", losses, held_out_losses)
    seconds = time.perf_counter() - start
    loss = held_out_losses[-1][1]
    result = dict(
        held_out_loss=loss,
        seconds=round(seconds, 1),
        parameters=parameters,
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        options=dataclasses.asdict(config),
    )
    (config.out / "result.json").write_text(json.dumps(result, indent=2, default=str) + "\n")
    print(f"held-out loss {loss:.3f} nats a byte after {seconds:.0f} s; see {config.out}/")
    return loss


if __name__ == "__main__":
    main()
