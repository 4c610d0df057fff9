"""Distance tables: learning, construction from another encoding, and resizing."""

from types import SimpleNamespace

import pytest
import torch

from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    FixedWindow,
    NoEncoding,
    SinusoidalEncoding,
)
from pelocality.metrics import direction_balance, locality, symmetry


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
        (lambda: DistanceTable(signed=1), TypeError, "signed"),
        (lambda: DistanceTable(shared="no"), TypeError, "shared"),
        (lambda: DistanceTable(learnable="no"), TypeError, "learnable"),
        (lambda: ramp().resize(0), ValueError, "length"),
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


def positional(heads=2, n=12, layers=3, causal=False):
    """Attention of signed tables of random numbers, (layer, head, n, n)."""
    tables = [DistanceTable(heads, n, signed=True, causal=causal) for _ in range(layers)]
    generator = torch.Generator().manual_seed(0)
    for table in tables:
        table.values.data.normal_(generator=generator)
    return torch.stack([table.weights(n) for table in tables]).detach()


def test_a_table_from_attention_is_the_log_profile_of_the_inner_tokens():
    attention = positional()
    tables = DistanceTable.from_attention(attention)
    assert len(tables) == 3
    assert all(table.signed and not table.causal and table.length == 10 for table in tables)
    for table, layer in zip(tables, attention, strict=True):
        for head in range(2):
            inner = layer[head, 1:-1, 1:-1].double()
            inner = inner / inner.sum(-1, keepdim=True)
            own = inner.diagonal()
            own = {k: own[max(0, -k) : 10 - max(0, k)].sum() for k in range(-9, 10)}
            logs = torch.stack([(inner.diagonal(k).sum() / own[k]).log() for k in range(-9, 10)])
            torch.testing.assert_close(table.values[head].double(), logs - logs.mean(), rtol=1e-5, atol=1e-5)
    far = tables[0](30).detach()
    assert torch.equal(far[:, 0, 9:], far[:, 0, 9:10].expand(-1, 21))  # beyond: the furthest distance measured


def test_a_table_from_attention_takes_what_metrics_take():
    attention = positional()
    wanted = DistanceTable.from_attention(attention)
    turned = SimpleNamespace(attention=attention.flip(0), layers=(2, 1, 0))  # as measured with layers=[2, 1, 0]
    for given in (tuple(attention), attention.numpy(), SimpleNamespace(attention=attention), turned):
        found = DistanceTable.from_attention(given)
        assert all(torch.equal(one.values, other.values) for one, other in zip(found, wanted, strict=True))


def test_a_table_from_uniform_attention_is_flat_also_if_causal():
    for causal in (False, True):
        attention = NoEncoding(2, causal=causal).weights(40)[None]
        (table,) = DistanceTable.from_attention(attention)
        assert table.causal == causal
        assert table.signed != causal
        torch.testing.assert_close(table.values.detach(), torch.zeros_like(table.values), rtol=0, atol=1e-5)
        torch.testing.assert_close(table.weights(40), attention[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("given", ["visible keys", "weights alone"])
def test_a_table_from_attention_in_chunks_counts_visible_keys_alone(given):
    """Llama 4 attends in chunks: queries at the beginning of a chunk see no key at a distance that others see."""
    chunk = torch.arange(26) // 6
    visible = (chunk[:, None] == chunk) & torch.ones(26, 26).tril().bool()
    slope = -0.3 * (torch.arange(26)[:, None] - torch.arange(26)).abs().double()
    logits = torch.stack([torch.zeros_like(slope), slope]).masked_fill(~visible, -torch.inf)[:, None]
    result = SimpleNamespace(attention=logits.softmax(-1), layers=(1, 0))
    if given == "visible keys":
        result.visible = visible.expand(2, 26, 26)
    sloped, flat = DistanceTable.from_attention(result)
    assert flat.causal
    for table, step in ((flat, 0.0), (sloped, -0.3)):
        steps = table.values.detach()[0, :6].diff()
        torch.testing.assert_close(steps, torch.full_like(steps, step), rtol=0, atol=1e-4)


@pytest.mark.parametrize("encoding", [ALiBi(4), ALiBi(4, causal=True), AttenuatedEncoding(4, 0.02, 0.5, "logits")])
def test_a_table_from_a_relative_encoding_is_its_bias(encoding):
    (table,) = DistanceTable.from_attention(encoding.weights(30)[None])
    torch.testing.assert_close(table.weights(28), encoding.weights(28), rtol=1e-4, atol=1e-7)


def test_attention_that_is_zero_gives_finite_numbers():
    (table,) = DistanceTable.from_attention(FixedWindow(width=2).weights(12)[None])
    assert table.values.isfinite().all()
    weights = table.weights(10)[0, 5]
    assert weights[:3].max() < 1e-30
    assert weights[3:8].min() > 0.1


def test_attention_without_a_table_is_refused():
    small = [torch.eye(n).expand(1, 1, n, n) for n in (2, 3)]
    for attention, cut in (
        (torch.eye(5), 1),
        *((each, 1) for each in small),
        (torch.ones(1, 1, 5, 5), 1),
        (small[1], -1),
    ):
        with pytest.raises(ValueError, match=r"attention|cut|token"):
            DistanceTable.from_attention(attention, cut=cut)


def dialled(**options):
    table = DistanceTable(2, 6, **({"signed": True} | options))
    table.values.data.normal_(generator=torch.Generator().manual_seed(1))
    return table


@pytest.mark.parametrize("options", [{}, {"signed": False}, {"shared": True}, {"learnable": False}])
def test_dials_at_one_change_nothing(options):
    table = dialled(**options)
    same = table.scaled()
    assert torch.equal(same.values, table.values)
    assert same.values is not table.values
    assert same.configuration() == table.configuration()


def test_a_table_without_its_antisymmetric_part_is_symmetric_as_published():
    table = dialled()
    assert symmetry(table.weights(9)).max() < 1
    turned = table.scaled(antisymmetric=0.0)
    assert torch.equal(turned.values, turned.values.flip(-1))
    assert torch.equal(symmetry(turned.weights(9)), torch.ones(2))
    torch.testing.assert_close(table.scaled(antisymmetric=-1.0).weights(9), table.weights(9).flip(-1, -2))


def test_parts_add_up_and_are_scaled_per_head():
    table = dialled()
    whole, even, odd = table.values, table.scaled(antisymmetric=0).values, table.scaled(symmetric=0).values
    torch.testing.assert_close(even + odd, whole)
    assert torch.equal(odd, -odd.flip(-1))
    mixed = table.scaled(symmetric=[0.5, 2.0], antisymmetric=[1.0, 0.0])
    torch.testing.assert_close(mixed.values, torch.stack([0.5 * even[0] + odd[0], 2 * even[1]]))
    assert torch.equal(table.scaled(symmetric=0.5, antisymmetric=0.5).values, whole / 2)


def test_an_added_decay_is_that_of_alibi_and_makes_attention_more_local():
    flat = DistanceTable(1, 20, signed=True)
    decayed = flat.scaled(decay=0.3)
    torch.testing.assert_close(decayed.weights(20), ALiBi(1, slopes=0.3).weights(20))
    table = DistanceTable.from_encoding(AttenuatedEncoding(2, 0.02), 20, signed=True)
    assert (locality(table.scaled(decay=0.5).weights(20)) > locality(table.weights(20))).all()


def test_attention_whose_future_is_too_small_for_its_dtype_is_causal_unless_said_otherwise():
    k = torch.arange(9.0) - torch.arange(9.0)[:, None]
    weights = torch.where(k > 0, -60 * k - 60, -0.1 * k.abs()).softmax(-1)[None, None]
    assert DistanceTable.from_attention(weights)[0].causal
    for table in (
        DistanceTable.from_attention(weights, causal=False)[0],
        DistanceTable.from_attention(SimpleNamespace(attention=weights, visible=None))[0],
    ):
        assert not table.causal
        assert table.signed
        assert (table.values[:, 7:] < -40).all()
    with pytest.raises(ValueError, match="causal=True hides keys with attention"):
        DistanceTable.from_attention(ALiBi(1).weights(9)[None], causal=True)


def test_dials_that_are_not_numbers_per_head_are_refused():
    large = {"symmetric": 3e38, "antisymmetric": 3e38}
    for options in ({"symmetric": [1.0, 2.0, 3.0]}, {"decay": float("nan")}, large, {"decay": 3e38}):
        with pytest.raises(ValueError, match=next(iter(options))):
            dialled().scaled(**options)
