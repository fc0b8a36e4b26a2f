"""`DecoderLM`: what a token may see, packing, recomputation, and its gradients."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_modules import Attention, DecoderConfig, DecoderLM

CONFIG = DecoderConfig(
    vocab_size=31,
    num_layers=2,
    features=16,
    num_heads=4,
    num_kv_heads=2,
    hidden_features=12,
    num_experts=4,
)
DENSE = dataclasses.replace(CONFIG, num_experts=0)
CONFIGS = pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["experts", "dense"])


def make(config=CONFIG, **changes):
    return DecoderLM(dataclasses.replace(config, **changes), rngs=nnx.Rngs(0))


# Whole models in one compilation each: op by op, every test would compile hundreds.
call = nnx.jit(lambda model, *args: model(*args))


def close(actual, expected, tolerance=5e-6):
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected, np.float64), atol=tolerance
    )


def tokens_of(rng, *shape):
    return jnp.asarray(rng.integers(0, CONFIG.vocab_size, shape), jnp.int32)


@CONFIGS
def test_is_causal(rng, config):
    model = make(config)
    tokens = tokens_of(rng, 2, 3, 9)
    out = call(model, tokens)
    assert out.logits.shape == (2, 3, 9, 31)
    assert out.logits.dtype == jnp.float32
    changed = call(model, tokens.at[..., 5].set((tokens[..., 5] + 1) % 31)).logits
    close(changed[..., :5, :], out.logits[..., :5, :])
    assert (jnp.abs(changed - out.logits)[..., 5:, :].max(axis=-1) > 1e-4).all()

    assert out.tokens_per_expert.shape == (2, config.num_experts)
    if config.num_experts:
        np.testing.assert_array_equal(out.tokens_per_expert.sum(axis=1), 2 * 3 * 9 * 2)
        assert 0.5 < out.load_balance_loss < 4
    else:
        assert out.load_balance_loss == 0


def test_packed_documents_do_not_see_each_other(rng):
    model = make()
    lengths = [6, 1, 6]
    documents = [tokens_of(rng, 1, n) for n in lengths]
    padding = jnp.zeros((1, 3), jnp.int32)
    packed = jnp.concatenate([*documents, padding], axis=1)
    positions = jnp.asarray([[*range(6), *range(1), *range(6), *range(3)]])
    segment_ids = jnp.asarray([[1] * 6 + [2] + [3] * 6 + [0] * 3])
    out = call(model, packed, positions, segment_ids)
    assert jnp.isfinite(out.logits).all()
    expected = [call(model, document) for document in documents]
    close(out.logits[:, :13], jnp.concatenate([e.logits for e in expected], axis=1))
    # Padding goes to no expert.
    counts = sum(e.tokens_per_expert for e in expected)
    np.testing.assert_array_equal(out.tokens_per_expert, counts)

    # Attention is relative, so positions may also run on through the row.
    running = call(model, packed, jnp.arange(16)[None], segment_ids)
    close(running.logits[:, :13], out.logits[:, :13], tolerance=2e-5)


def count_primitives(jaxpr, counts):
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        for parameter in equation.params.values():
            for value in parameter if isinstance(parameter, (tuple, list)) else [parameter]:
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    count_primitives(inner, counts)
    return counts


def gradient_program(config):
    graphdef, params = nnx.split(DecoderLM(config, rngs=nnx.Rngs(0)))
    tokens = jnp.arange(18).reshape(2, 9)
    segment_ids = jnp.asarray([[1] * 5 + [2] * 4, [1] * 9])

    def loss(params):
        out = nnx.merge(graphdef, params)(tokens, None, segment_ids)
        return jnp.mean(jax.nn.logsumexp(out.logits, axis=-1)) + 0.1 * out.load_balance_loss

    return loss, params


@CONFIGS
def test_remat_saves_attention(config):
    """With attention's output saved, no block runs the attention forward a second time."""
    counts = {}
    for name, options in {
        "plain": dict(),
        "saved": dict(remat=True),
        "nothing": dict(remat=True, remat_saves=()),
    }.items():
        loss, params = gradient_program(dataclasses.replace(config, **options))
        jaxpr = jax.make_jaxpr(jax.grad(loss))(params)
        counts[name] = count_primitives(jaxpr.jaxpr, collections.Counter())
    layers = config.num_layers
    assert {n: c["flash_attention_fwd"] for n, c in counts.items()} == {
        "plain": layers,
        "saved": layers,
        "nothing": 2 * layers,
    }
    assert all(c["flash_attention_bwd"] == layers for c in counts.values())
    # The rest of the block is recomputed in both.
    assert counts["saved"]["dot_general"] > counts["plain"]["dot_general"]


def test_all_parameters_learn_and_remat_changes_no_gradient():
    grads = []
    for remat in (False, True):
        loss, params = gradient_program(dataclasses.replace(CONFIG, num_layers=1, remat=remat))
        grads.append(jax.jit(jax.grad(loss))(params))
    jax.tree.map(close, *grads)
    for path, grad in nnx.to_flat_state(grads[0]):
        assert jnp.isfinite(grad[...]).all(), path
        assert jnp.abs(grad[...]).max() > 0, path


def test_remat_saves_the_experts_by_name():
    config = dataclasses.replace(CONFIG, remat=True)
    named = dataclasses.replace(config, remat_saves=("context", "moe_mlpwi", "moe_mlpwo"))
    counts = []
    for c in (CONFIG, config, named):
        loss, params = gradient_program(c)
        jaxpr = jax.make_jaxpr(jax.grad(loss))(params)
        counts.append(count_primitives(jaxpr.jaxpr, collections.Counter())["ragged_dot"])
    assert counts[0] <= counts[2] < counts[1]


def test_embedding_is_tied():
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(make(), nnx.Param))]
    assert shapes.count((31, 16)) == 1
    assert (16, 31) not in shapes


def test_bfloat16(rng):
    tokens = tokens_of(rng, 2, 9)
    out = call(make(num_layers=1, dtype=jnp.bfloat16), tokens)
    assert out.logits.dtype == jnp.float32
    # Rounding may send a token to another expert: its logits are then far off, the mean is not.
    assert jnp.abs(out.logits - call(make(num_layers=1), tokens).logits).mean() < 0.05
    half = make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    kernels = nnx.state(half, nnx.PathContains("attention"))
    assert {leaf.dtype for leaf in jax.tree.leaves(kernels)} == {jnp.dtype(jnp.bfloat16)}


def test_config_is_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.num_layers = 3
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))


def test_attention_errors_and_metadata():
    with pytest.raises(ValueError, match=r"num_kv_heads=3 .*num_heads=4"):
        Attention(16, 4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"head_dim .*even.*5"):
        Attention(16, 4, head_dim=5, rngs=nnx.Rngs(0))
    layer = Attention(16, 4, kernel_metadata=dict(note="heads"), rngs=nnx.Rngs(0))
    assert layer.query.kernel.get_metadata()["note"] == "heads"
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        make(implementation="mosaic_gpu")(jnp.zeros((1, 4), jnp.int32))
