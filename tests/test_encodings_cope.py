"""CoPE against its equations, key by key."""

import math

import pytest
import torch

from pelocality.encodings import CoPE, Encoding, PositionalSelfAttention, biased_attention


def by_hand(query, key, value, vectors, visible):
    """Return the outputs of one head, each query, key and counted key in a loop."""
    n, d = query.shape
    last = len(vectors) - 1
    outputs = []
    for i in range(n):
        keys = [j for j in range(i + 1) if visible[j]]
        gates = {t: 1 / (1 + math.exp(-float(query[i] @ key[t]) / math.sqrt(d))) for t in keys}
        logits = []
        for j in keys:
            p = min(sum(gates[t] for t in keys if t >= j), last)
            low, high = math.floor(p), math.ceil(p)
            e = (1 - (p - low)) * vectors[low] + (p - low) * vectors[high]
            logits.append(float(query[i] @ key[j]) / math.sqrt(d) + float(query[i] @ e))
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        outputs.append(sum(w * value[j] for w, j in zip(weights, keys, strict=True)))
    return torch.stack(outputs)


@pytest.fixture
def encoding():
    torch.manual_seed(0)
    made = CoPE(dim=6, positions=4, heads=2).double()
    torch.nn.init.normal_(made.vectors)
    return made


@pytest.mark.parametrize("hidden", [(), (0,), (2, 5)])
def test_positions_are_the_sums_of_gates(encoding, hidden):
    query, key, value = torch.randn(3, 1, 2, 8, 6, dtype=torch.float64)
    visible = torch.ones(8, dtype=torch.bool)
    visible[list(hidden)] = False
    rows = slice(1, None) if 0 in hidden else slice(None)
    output = biased_attention(query, key, value, encoding, mask=visible[None, None, None] if hidden else None)
    for head in range(2):
        parts = (each[0, head, rows] for each in (query, key, value))
        expected = by_hand(*parts, encoding.vectors.detach(), visible[rows])
        torch.testing.assert_close(output[0, head, rows].detach(), expected)


def test_open_gates_count_tokens(encoding):
    positions = encoding.position(torch.full((1, 1, 3, 3), 50.0), torch.ones(3, 3).tril() > 0)
    assert positions[0, 0].tril().tolist() == [[1, 0, 0], [2, 1, 0], [3, 2, 1]]


def test_queries_behind_a_cache_are_those_of_the_whole(encoding):
    query, key, value = torch.randn(3, 1, 2, 8, 6, dtype=torch.float64)
    whole = biased_attention(query, key, value, encoding)
    torch.testing.assert_close(biased_attention(query[:, :, -1:], key, value, encoding), whole[:, :, -1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_are_counted_in_float32(dtype):
    torch.manual_seed(0)
    encoding = CoPE(dim=8, positions=512)
    torch.nn.init.normal_(encoding.vectors)
    query = torch.randn(1, 1, 512, 8).to(dtype)
    half, exact = (encoding.attention_inputs(each, each)[2].double() for each in (query, query.float()))
    differences = (half - half.amax(-1, keepdim=True)) - (exact - exact.amax(-1, keepdim=True))
    assert differences.nan_to_num().abs().max() < 20 * torch.finfo(dtype).eps * exact.nan_to_num(0, 0, 0).abs().max()


def test_nan_stays_nan(encoding):
    query, key, value = torch.randn(3, 1, 2, 8, 6, dtype=torch.float64)
    key[0, 0, 3] = torch.nan
    output = biased_attention(query, key, value, encoding)
    assert output[0, 0, 4:].isnan().all()
    assert output[0, 1].isfinite().all()


def test_cope_learns_and_is_rebuilt(encoding):
    layer = PositionalSelfAttention(12, 2, encoding).double()
    layer(torch.randn(2, 5, 12, dtype=torch.float64))[0].sum().backward()
    assert encoding.vectors.grad.abs().sum() > 0
    again = Encoding.from_configuration(encoding.configuration())
    again.load_state_dict(encoding.state_dict())


def test_sizes_are_checked():
    with pytest.raises(RuntimeError, match="shapes"):
        biased_attention(*torch.randn(3, 1, 2, 4, 8), CoPE(dim=6, heads=2))
    with pytest.raises(TypeError, match="queries and keys"):
        CoPE(dim=6)(5)
