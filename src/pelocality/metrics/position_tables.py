"""From a table of position embeddings to the attention it would give alone."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Similarity = Literal["dot", "cosine"]


def position_weights(
    table: Tensor | np.ndarray,
    query: Tensor | np.ndarray | None = None,
    key: Tensor | np.ndarray | None = None,
    similarity: Similarity = "dot",
    temperature: float | None = None,
) -> Tensor:
    """Turn a table of position embeddings into positional weights, one row-stochastic matrix per head.

        delta_ij = (p_i W_q)(p_j W_k)^T,    A = softmax_j(delta / temperature)

    delta is the positional correlation of absolute encodings (Chen et al. 2023); without W_q and W_k the embeddings
    are compared as they are, with their cosine for ``similarity="cosine"``.

    Args:
        table: Position embeddings P, (n, d).
        query: W_q, (d, d_head), or (heads, d, d_head). Of a ``torch.nn.Linear`` this is ``weight.T``.
        key: W_k, of the same shape; both or neither.
        similarity: ``"dot"``, or ``"cosine"`` of the two projected embeddings.
        temperature: What the similarity is divided by. None: sqrt(d_head) for dot products, as attention does
            (sqrt(d) without projections), and 1 for cosines.

    Returns:
        (n, n), or (heads, n, n); rows sum to 1; half precision comes back as float32.

    Raises:
        TypeError: No float tensors or arrays.
        ValueError: Shapes that do not fit, NaN or infinity, an unknown similarity, a temperature that is not positive,
            similarities beyond the range of the precision.

    Note:
        With the temperature of 1, a cosine can never prefer one key to another by more than e^2, so even a strongly
        local table gives nearly uniform weights at large n. Dot products keep the scale the model learned.

    Examples:
        >>> import torch
        >>> position = torch.arange(4.0)[:, None]
        >>> table = torch.cat([position.cos(), position.sin()], -1)
        >>> position_weights(table, temperature=0.5)[0]
        tensor([0.6774, 0.2701, 0.0399, 0.0127])
    """
    queries, keys = projections(table, query, key, similarity, temperature)
    return weights_of(queries, keys)


def weights_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Turn queries and keys into weights.

    Args:
        queries: (..., m, d_head), divided by the temperature.
        keys: (..., n, d_head).

    Returns:
        (..., m, n), rows sum to 1.

    Raises:
        ValueError: Their products are too large for the precision.
    """
    weights = (queries @ keys.transpose(-1, -2)).softmax(-1)
    if bool(weights[..., 0].isnan().any()):  # an infinite logit makes the whole row NaN
        raise ValueError(
            f"table gives similarities beyond the range of {queries.dtype}; give it in float64, scale it down, or "
            "raise the temperature"
        )
    return weights


def projections(
    table: Tensor | np.ndarray,
    query: Tensor | np.ndarray | None,
    key: Tensor | np.ndarray | None,
    similarity: Similarity,
    temperature: float | None,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose products are the positional logits.

    Args:
        table: As for `position_weights`, and so the rest.
        query: See there.
        key: See there.
        similarity: See there.
        temperature: See there.

    Returns:
        Queries, divided by the temperature, and keys: (n, d_head), or (heads, n, d_head).

    Raises:
        TypeError: As for `position_weights`.
        ValueError: As for `position_weights`.
    """
    positions = _floats("table", table)
    if positions.ndim != 2 or positions.shape[0] == 0:
        raise ValueError(f"table must be (n, d), one embedding per position, got shape {tuple(positions.shape)}")
    if (query is None) != (key is None):
        raise ValueError("query and key come together: give both W_q and W_k, or neither")
    queries = keys = positions
    if query is not None:
        queries, keys = (
            positions @ _projection(name, given, positions) for name, given in (("query", query), ("key", key))
        )
        if queries.shape != keys.shape:
            raise ValueError(
                f"query and key must have one shape, got {tuple(queries.shape)} and {tuple(keys.shape)} when applied"
            )
    if similarity not in ("dot", "cosine"):
        raise ValueError(f"similarity must be 'dot' or 'cosine', got {similarity!r}")
    if similarity == "cosine":
        queries, keys = torch.nn.functional.normalize(queries, dim=-1), torch.nn.functional.normalize(keys, dim=-1)
    if temperature is None:
        temperature = math.sqrt(queries.shape[-1]) if similarity == "dot" else 1.0
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return queries / temperature, keys


def _projection(name: str, given: Tensor | np.ndarray | None, positions: Tensor) -> Tensor:
    matrix = _floats(name, given).to(positions)
    if matrix.ndim not in (2, 3) or matrix.shape[-2] != positions.shape[-1]:
        raise ValueError(
            f"{name} must be (d, d_head) or (heads, d, d_head) with d = {positions.shape[-1]}, "
            f"got shape {tuple(matrix.shape)}; the weight of a torch.nn.Linear needs .T"
        )
    return matrix


def _floats(name: str, given: Tensor | np.ndarray | None) -> Tensor:
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(np.array(given))
    if not isinstance(given, Tensor) or not given.is_floating_point():
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{name} must be a tensor or array of floating-point numbers, got {kind}")
    if not bool(torch.isfinite(given).all()):
        raise ValueError(f"{name} contains NaN or infinity")
    return given.to(torch.promote_types(given.dtype, torch.float32))
