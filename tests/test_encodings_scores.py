"""The masked softmax."""

import torch

from pelocality.encodings._scores import masked_softmax


def test_a_fully_masked_row_has_zeros_and_gradients_of_zero():
    logits = torch.tensor([[0.5, 1.5], [2.0, -1.0]], requires_grad=True)
    weights = masked_softmax(logits, torch.tensor([[True, False], [False, False]]))
    assert weights.tolist() == [[1, 0], [0, 0]]
    weights.square().sum().backward()
    assert logits.grad.tolist() == [[0, 0], [0, 0]]


def test_without_a_mask_it_is_the_softmax_except_in_rows_of_minus_infinity():
    logits = torch.randn(3, 4)
    torch.testing.assert_close(masked_softmax(logits, None), logits.softmax(-1))
    assert masked_softmax(torch.full((1, 2), -torch.inf), None).tolist() == [[0, 0]]
