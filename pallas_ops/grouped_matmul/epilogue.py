"""What follows the product in the same kernel: activations, in the accumulator's dtype."""

import jax
import jax.numpy as jnp

GATED = ("swiglu", "geglu")
ACTIVATIONS = ("relu", "gelu", "silu", *GATED)


def activate(x: jax.Array, activation: str | None) -> jax.Array:
    """The activation of `[rows, N]`: `[rows, N]`, or `[rows, N/2]` if gated. All map 0 to 0."""
    match activation:
        case "relu":
            return jax.nn.relu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=True)
        case "silu":
            return jax.nn.silu(x)
        case "swiglu" | "geglu":
            gate, up = jnp.split(x, 2, axis=1)  # [rows, N/2] each
            return activate(gate, "silu" if activation == "swiglu" else "gelu") * up
    return x


def width(n: int, activation: str | None) -> int:
    """Columns of the output for `n` columns of the product."""
    return n // 2 if activation in GATED else n
