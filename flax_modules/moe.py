"""A dropless mixture-of-experts layer on `pallas_ops.ragged_dot`."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.ad_checkpoint import checkpoint_name

import pallas_ops

Array = jax.Array


class MoEStats(NamedTuple):
    """What a call of `MoE` tells about its routing.

    Attributes:
      load_balance_loss: float32 scalar, `E * sum_e f_e * p_e` with `f_e` the share of all choices
        that went to expert e and `p_e` its mean router probability (Switch Transformer, eq. 4, so
        that a uniform router gives 1 for every k). Add it to the loss with a small factor.
      tokens_per_expert: int32[E], how many tokens each expert was given.
    """

    load_balance_loss: Array
    tokens_per_expert: Array


class MoE(nnx.Module):
    """SwiGLU experts behind a top-k router; every token reaches all k experts that it chose.

    The router works in float32 whatever the computation dtype. Rows are sorted by expert and meet
    their expert's matrices in two grouped products, so nothing is padded and nothing is dropped.

    Args:
      in_features: D, size of the input and the output.
      hidden_features: F, width of each expert.
      num_experts: E.
      experts_per_token: k.
      softmax_order: "before": softmax over all E logits, then the k largest probabilities are the
        weights (Switch, Mixtral, Qwen3-MoE, OLMoE). "after": softmax over the k largest logits
        (gpt-oss), which is the same as "before" with `renormalize=True`.
      renormalize: divides the k weights by their sum ("after" gives that sum of 1 by itself). With
        k = 1 the weight is then always 1 and the router gets no gradient from the output: a warning
        says so.
      dtype: computation dtype of the experts and of the output; None: promoted from input and
        parameters.
      param_dtype: dtype of the experts' parameters. The router's are float32.
      kernel_init: initializer of one expert's matrix `[in, out]`.
      router_init: initializer of the router's matrix `[D, E]`.
      kernel_metadata: metadata of `gate_up` and `down` (sharding, for instance).
      router_metadata: metadata of the router's kernel.
      precision: of the experts' products.
      implementation: as in `pallas_ops.ragged_dot`.
      rngs: source of the parameters' keys.

    Parameters: `router.kernel [D, E]`, `gate_up [E, D, 2F]` with columns [gate | up], and
    `down [E, F, D]`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        experts_per_token: int,
        *,
        softmax_order: Literal["before", "after"] = "before",
        renormalize: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),
        router_init: nnx.Initializer = nnx.initializers.lecun_normal(),
        kernel_metadata: Mapping[str, Any] | None = None,
        router_metadata: Mapping[str, Any] | None = None,
        precision: Any = None,
        implementation: str | Sequence[str] | None = None,
        rngs: nnx.Rngs,
    ):
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(
                f"experts_per_token must be in [1, {num_experts=}], got {experts_per_token}"
            )
        if softmax_order not in ("before", "after"):
            raise ValueError(f"softmax_order must be 'before' or 'after', got {softmax_order!r}")
        if experts_per_token == 1 and (renormalize or softmax_order == "after"):
            warnings.warn(
                f"experts_per_token=1 with {softmax_order=} and {renormalize=} makes every weight "
                "1: the router gets no gradient from the output",
                stacklevel=2,
            )
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.softmax_order = softmax_order
        self.renormalize = renormalize
        self.dtype = dtype
        self.precision = precision
        self.implementation = implementation
        self.router = nnx.Linear(
            in_features,
            num_experts,
            use_bias=False,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            kernel_init=router_init,
            kernel_metadata=dict(router_metadata or {}),
            # A token must not change its expert with the backend's default for float32 products.
            precision=jax.lax.Precision.HIGHEST,
            rngs=rngs,
        )

        def experts(*shape):
            # One key per expert: an initializer on [E, in, out] would count E in its fan-in.
            keys = jax.random.split(rngs.params(), num_experts)
            value = jax.vmap(lambda key: kernel_init(key, shape, param_dtype))(keys)
            return nnx.Param(value, **dict(kernel_metadata or {}))

        self.gate_up = experts(in_features, 2 * hidden_features)
        self.down = experts(hidden_features, in_features)

    def route(self, x: Array) -> tuple[Array, Array, Array]:
        """Chooses the experts of each token.

        Args:
          x: `[M, D]`.

        Returns:
          `(weights float32[M, k], experts int32[M, k], probabilities float32[M, E])`.
        """
        logits = self.router(x.astype(jnp.float32))  # [M, E]
        probabilities = jax.nn.softmax(logits)
        if self.softmax_order == "before":
            weights, experts = jax.lax.top_k(probabilities, self.experts_per_token)
            if self.renormalize:
                weights = weights / weights.sum(axis=-1, keepdims=True)
        else:
            weights, experts = jax.lax.top_k(logits, self.experts_per_token)
            weights = jax.nn.softmax(weights)
        return weights, experts, probabilities

    def __call__(self, x: Array, mask: Array | None = None) -> tuple[Array, MoEStats]:
        """Applies the experts.

        Args:
          x: `[*batch, D]`.
          mask: bool `[*batch]`; tokens where it is False (padding) go to no expert, give 0, and
            count in no statistic; what they hold reaches nothing. None: all tokens count.

        Returns:
          `(y, stats)`, `y` of the shape of `x`.
        """
        *batch, features = x.shape
        if mask is not None and mask.shape != tuple(batch):
            raise ValueError(f"mask must have shape {tuple(batch)}, got {mask.shape}")
        x, gate_up, down = dtypes.promote_dtype(
            (x, self.gate_up[...], self.down[...]), dtype=self.dtype
        )
        x = x.reshape(-1, features)  # [M, D]
        if mask is not None:
            mask = mask.reshape(-1, 1)  # [M, 1]
            x = jnp.where(mask, x, 0)
        weights, experts, probabilities = self.route(x)
        if mask is not None:
            # Expert E does not exist: its rows sort behind all others, where ragged_dot gives 0.
            experts = jnp.where(mask, experts, self.num_experts)
            probabilities = jnp.where(mask, probabilities, 0)

        k = self.experts_per_token
        experts = experts.reshape(-1)  # [M*k], token-major
        order = jnp.argsort(experts, stable=True)
        inverse = jnp.argsort(order)
        group_sizes = jnp.bincount(experts, length=self.num_experts).astype(jnp.int32)
        ragged_dot = functools.partial(
            pallas_ops.ragged_dot,
            group_sizes=group_sizes,
            precision=self.precision,
            implementation=self.implementation,
        )
        rows = _take_rows(x, order, inverse, k)  # [M*k, D], sorted by expert
        hidden = checkpoint_name(ragged_dot(rows, gate_up, activation="swiglu"), "moe_mlpwi")
        rows = checkpoint_name(ragged_dot(hidden, down), "moe_mlpwo")  # [M*k, D]
        rows = _take_rows(rows, inverse, order, 1).reshape(-1, k, features)  # [M, k, D]
        y = jnp.sum(rows.astype(jnp.float32) * weights[:, :, None], axis=1).astype(x.dtype)

        count = jnp.maximum(1, x.shape[0] if mask is None else mask.sum()).astype(jnp.float32)
        share = group_sizes.astype(jnp.float32) / (count * k)  # [E]
        balance = self.num_experts * jnp.sum(share * probabilities.sum(axis=0) / count)
        return y.reshape(*batch, features), MoEStats(balance, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _take_rows(x, index, inverse, copies):
    """Rows `index` of x, whose rows count `copies` times each; `inverse` undoes `index`."""
    del inverse
    return x.at[index // copies].get(mode="promise_in_bounds")


def _take_rows_fwd(x, index, inverse, copies):
    return _take_rows(x, index, inverse, copies), inverse


def _take_rows_bwd(copies, inverse, g):
    # The transpose of a permutation is a gather too: no scatter, hence no atomics on a GPU.
    g = g.at[inverse].get(mode="promise_in_bounds")
    if copies > 1:
        g = g.reshape(-1, copies, g.shape[-1]).astype(jnp.float32).sum(axis=1).astype(g.dtype)
    return g, None, None


_take_rows.defvjp(_take_rows_fwd, _take_rows_bwd)
