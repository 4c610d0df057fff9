"""Toeplitz matrices and their derivatives against indexing."""

import functools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pelocality._toeplitz import diagonal_sums, diagonals, toeplitz


@settings(max_examples=20, deadline=None)
@given(queries=st.integers(1, 12), extra=st.integers(0, 12), heads=st.integers(1, 3))
def test_toeplitz_fills_diagonals(queries, extra, heads):
    keys = queries + extra
    numbers = torch.randn(heads, queries + keys - 1)
    matrix = toeplitz(numbers, queries)
    for i in range(queries):
        for j in range(keys):
            assert torch.equal(matrix[:, i, j], numbers[:, j - i + queries - 1])


def gathered(numbers, queries):
    """Return the matrix of `toeplitz` by indexing."""
    keys = numbers.shape[-1] - queries + 1
    return numbers[..., torch.arange(keys) - torch.arange(queries)[:, None] + queries - 1]


def test_gradients_are_summed_over_more_rows_than_one_block():
    numbers = torch.randn(2, 150 + 170 - 1, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(2, 150, 170, dtype=torch.float64)
    (plain,) = torch.autograd.grad(toeplitz(numbers, 150), numbers, gradient)
    torch.testing.assert_close(plain, torch.autograd.grad(gathered(numbers, 150), numbers, gradient)[0])


@pytest.mark.parametrize("queries", [1, 3, 66])
def test_every_derivative_of_toeplitz_is_that_of_indexing(queries):
    batch = torch.randn(2, 1, queries + 4, dtype=torch.float64)

    def loss(matrix_of, numbers):
        return matrix_of(numbers, queries).square().softmax(-1).square().sum()

    ours, theirs = functools.partial(loss, toeplitz), functools.partial(loss, gathered)
    for derivative in (
        torch.func.grad,
        torch.func.jacfwd,
        torch.func.hessian,
        lambda f: torch.func.jacrev(torch.func.jacrev(f)),
        lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    ):
        found, expected = (torch.func.vmap(derivative(f))(batch) for f in (ours, theirs))
        torch.testing.assert_close(found, expected)


def test_gradients_have_gradients():
    numbers = torch.randn(1, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: toeplitz(x, 3).square(), numbers)


def test_diagonals_are_the_numbers_of_the_matrix_and_their_sums_count_each_as_often_as_it_stands_there():
    numbers, often = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), torch.tensor([1.0, 2.0, 3.0, 3.0, 2.0, 1.0])
    matrix = toeplitz(numbers, 3)  # (1, 3, 4)
    assert torch.equal(diagonals(matrix[..., 0], matrix[..., 0, :]), numbers)
    assert torch.equal(diagonal_sums(matrix), often * numbers)
