"""Distance tables: learning, construction from another encoding, and resizing."""

import numpy as np
import pytest
import torch

from pelocality.encodings import KERPLE, ALiBi, AttenuatedEncoding, DistanceTable, FixedWindow, SinusoidalEncoding
from pelocality.metrics import direction_balance, symmetry


def ramp(**options):
    table = DistanceTable(length=4, **options)
    with torch.no_grad():
        table.values.copy_(torch.arange(table.values.numel()).reshape(table.values.shape))
    return table


def test_an_unsigned_table_depends_on_the_distance_and_a_signed_one_also_on_its_sign():
    unsigned, signed = ramp(), ramp(signed=True)
    for i in range(4):
        for j in range(4):
            assert unsigned(4)[0, i, j] == abs(i - j)
            assert signed(4)[0, i, j] == j - i + 3


def test_larger_distances_use_the_last_number():
    assert ramp()(9)[0, 0].tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert ramp(signed=True)(9)[0, 4].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 6]


def test_a_shared_table_has_one_row_for_all_heads():
    table = ramp(heads=6, shared=True)
    assert table.values.shape == (1, 4)
    assert table(5).shape == (6, 5, 5)


@pytest.mark.parametrize(
    "encoding",
    [
        AttenuatedEncoding(heads=2, decay=[0.1, 0.5], form="logits"),
        AttenuatedEncoding(heads=2, decay=0.01, symmetry=3.0, form="logits", learnable=True),
        ALiBi(heads=2),
        ALiBi(heads=2, causal=True),
        KERPLE(heads=2),
        SinusoidalEncoding(heads=2),
    ],
)
def test_a_table_starts_with_the_bias_of_any_relative_encoding(encoding):
    table = DistanceTable.from_encoding(encoding, length=20)
    torch.testing.assert_close(table(20), encoding(20))
    assert table.values.is_leaf
    assert table.values.requires_grad


def test_from_the_weights_form_a_table_starts_as_delta_normalised_over_both_sides():
    encoding = AttenuatedEncoding(decay=0.5)
    table = DistanceTable.from_encoding(encoding, length=30)
    torch.testing.assert_close(table(59)[0, 29], encoding(59)[0, 29])
    assert table(59)[0, 29].sum().item() == pytest.approx(1)  # in the authors' code it is 1.43


def test_a_table_is_signed_only_if_the_encoding_is_not_symmetric():
    leaning = AttenuatedEncoding(decay=0.5, symmetry=2.0)
    assert DistanceTable.from_encoding(leaning, length=8).signed
    assert not DistanceTable.from_encoding(ALiBi(heads=2), length=8).signed
    assert not DistanceTable.from_encoding(ALiBi(heads=2, causal=True), length=8).signed
    assert DistanceTable.from_encoding(ALiBi(heads=2), length=8, signed=True).values.shape == (2, 15)


def test_an_unsigned_table_stays_symmetric_and_a_signed_one_learns_an_asymmetry():
    target = AttenuatedEncoding(decay=0.1, symmetry=4.0, form="logits")(16)
    for signed in (False, True):
        table = DistanceTable.from_encoding(AttenuatedEncoding(decay=0.1, form="logits"), length=16, signed=signed)
        optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            (table(16).softmax(-1) - target.softmax(-1)).square().sum().backward()
            optimizer.step()
        assert (symmetry(table.weights(16)) == 1).item() is not signed
        assert (direction_balance(table.weights(16)).item() < -0.1) is signed


@pytest.mark.parametrize("signed", [False, True])
def test_a_longer_table_has_the_same_bias_before_training(signed):
    table = ramp(signed=signed)
    longer = table.resize(10)
    assert longer.length == 10
    assert longer.signed == signed
    assert torch.equal(longer(20), table(20))
    assert torch.equal(longer.resize(4).values, table.values)


def test_a_shorter_table_drops_only_the_distances_beyond():
    shorter = ramp(heads=3, signed=True).resize(2)
    assert shorter.values.shape == (3, 3)
    assert torch.equal(shorter(2), ramp(heads=3, signed=True)(2))


def test_resizing_keeps_dtype_and_requires_grad():
    table = ramp().double()
    table.values.requires_grad_(False)
    assert table.resize(6).values.dtype == torch.float64
    assert not table.resize(6).values.requires_grad
    half = ramp(learnable=False).half()  # the values keep their dtype, the bias does not
    assert half.resize(6)(3).dtype == torch.float16
    assert half.resize(6).values.dtype == torch.float32
    assert not dict(ramp(learnable=False).resize(6).named_parameters())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: DistanceTable(length=0), ValueError, "length"),
        (lambda: DistanceTable(signed=np.True_), TypeError, "signed must be True or False"),
        (lambda: DistanceTable(shared="no"), TypeError, "shared must be True or False"),
        (lambda: DistanceTable(learnable="no"), TypeError, "learnable must be True or False"),
        (lambda: ramp().resize(0), ValueError, "length"),
        (lambda: DistanceTable.from_encoding(torch.eye(3), 4), TypeError, "RelativeEncoding"),
        (lambda: DistanceTable.from_encoding(FixedWindow(), 9), ValueError, "masks some distances"),
        (
            lambda: DistanceTable.from_encoding(AttenuatedEncoding(symmetry=2.0), 9, signed=False),
            ValueError,
            "signed=True",
        ),
        (lambda: DistanceTable.from_encoding(ALiBi(heads=2), 9, shared=True), ValueError, "heads differ"),
    ],
)
def test_a_bias_that_a_table_cannot_hold_raises_an_error(call, error, words):
    with pytest.raises(error, match=words):
        call()
