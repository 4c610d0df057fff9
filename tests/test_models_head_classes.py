"""head_classes on heads built by hand that are exactly one class, and on matrices whose scores are known."""

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import ALiBi, SequenceModel, attach, head_classes, text_average
from pelocality.models.heads.sums import StateSums
from pelocality.models.heads.weights import direction, symmetry, weight_scores
from tests.families import small, tiny, tokens

V, N = 80, 24
HEADS = ("previous", "duplicate", "sink", "uniform", "four before", "next")


class ByHand(nn.Module):
    """Two layers of heads that are one class each; heads that find nothing attend to the first token.

    The state of a token is its id and what its previous-token head has read, one-hot each.
    """

    def __init__(self, causal=True):
        super().__init__()
        self.unused, self.causal = nn.Linear(1, 1), causal

    def forward(self, ids):
        token, n = nn.functional.one_hot(ids, V).float(), ids.shape[1]
        position = torch.arange(n)
        distance, same = position - position[:, None], token @ token.mT
        self.hidden = torch.where(distance > 0, -torch.inf, 0.0) if self.causal else torch.zeros(n, n)
        first = torch.where(position == 0, 50.0, 0.0).expand(n, n)
        at = {k: 100.0 * (distance == k) + first for k in (-1, -4, 1)}
        other = 100.0 * same * (distance != 0) + first
        heads = [at[-1], other, first, torch.zeros(n, n), at[-4], at[1]]
        read = self.attend(torch.stack([each.expand(len(ids), n, n) for each in heads], 1), token)
        induction = 100.0 * token @ read[:, 0].mT + first  # the key whose previous token is the query
        return self.attend(torch.stack([induction] * len(HEADS), 1), token)

    def attend(self, logits, values):
        return torch.softmax(logits + self.hidden, -1) @ values[:, None]


def by_hand(causal=True, **options):
    return head_classes(SequenceModel(ByHand(causal), vocabulary_size=V), length=N, progress=False, **options)


def test_heads_built_by_hand_have_a_score_of_one_in_their_class_and_none_in_others():
    scores = by_hand().scores
    for name, head in (("previous", 0), ("sink", 2)):
        assert scores[name][0, head] == pytest.approx(1, abs=1e-6)
    assert scores["duplicate"][0, 1] == pytest.approx(1, abs=1e-6)
    assert scores["induction"][1].tolist() == pytest.approx([1] * 6, abs=1e-6)
    for name in ("duplicate_control", "induction_control"):
        assert scores[name][:, [0, 1, 2, 4]].abs().max() < 1e-6
    assert scores["previous"][0, [1, 2, 4]].abs().max() < 1e-6
    assert scores["sink"][0, 4] == pytest.approx(4 / 23, abs=0.03)  # queries 1 to 4 have no key four before but it
    assert scores["offset"][0, [0, 4]].tolist() == [-1, -4]
    assert scores["offset_weight"][0, [0, 4]].tolist() == pytest.approx([1, 1], abs=1e-6)
    uniform = sum(1 / torch.arange(2.0, N + 1)) / (N - 1)
    assert scores["sink"][0, 3] == pytest.approx(float(uniform), abs=1e-6)
    assert scores["sink_control"].flatten().tolist() == pytest.approx([float(uniform)] * 12, abs=1e-6)
    assert scores["next"].isnan().all()


def test_heads_built_by_hand_are_classified():
    result = by_hand()
    assert result.classes()[0][:5] == ["previous", "duplicate", "sink", "other", "offset"]
    assert result.classes()[1] == ["induction"] * 6
    assert {*result.classes(2.0)[0]} == {"other"}
    assert by_hand(causal=False).classes()[0][5] == "next"


def test_a_head_that_attends_to_the_place_of_a_repetition_is_told_by_the_control():
    class Far(ByHand):
        def forward(self, ids):
            n = ids.shape[1]
            self.hidden = torch.full((n, n), -torch.inf).triu(1)
            logits = 100.0 * torch.eye(n).roll(1 - N // 2, 1)
            return self.attend(logits.expand(len(ids), 1, n, n), nn.functional.one_hot(ids, V).float())

    result = head_classes(SequenceModel(Far(), vocabulary_size=V), length=N, progress=False)
    assert result.scores["induction"].item() == result.scores["induction_control"].item() == pytest.approx(1)
    assert result.classes() == [["offset"]]


def test_positional_attention_stays_and_symbolic_attention_follows_the_tokens():
    ids = tokens(32, N) % V
    ids[:, 9] = ids[:, -1]  # what the duplicate head of the last token finds
    ids[:, 1:9], ids[:, 10:-1] = ids[:, 1:9].clamp(max=38), ids[:, 10:-1].clamp(max=38)
    ids[:, [9, -1]] = 39
    texts = [{"input_ids": part} for part in ids.split(5)]
    scores = by_hand(tokenizer=None, texts=texts, special_tokens=True, permutations=20).scores
    assert scores["positional"][0, [0, 4]].tolist() == pytest.approx([1, 1], abs=1e-6)
    assert scores["symbolic"][0, [0, 4]].abs().max() < 0.1
    assert scores["symbolic"][0, 1] == pytest.approx(1, abs=1e-6)
    assert abs(scores["positional"][0, 1]) < 0.1
    assert scores["positional"][0, [2, 3]].isnan().all()  # all keys that move have the same weight
    assert scores["symbolic"][0, [2, 3]].isnan().all()


def test_correlations_are_those_of_a_slow_loop():
    model, ids = tiny("gpt2"), tokens(3, 12)
    model.set_attn_implementation("eager")
    result = head_classes(model, texts=[{"input_ids": ids}], special_tokens=True, length=12, permutations=1, seed=7)
    sums = torch.zeros(2, 3, dtype=torch.float64)
    weights = model(ids, output_attentions=True).attentions[1][:, 1].detach()
    for text in range(3):
        order = np.random.default_rng((7, text, 0)).permutation(10) + 1  # where the tokens 1 to 10 go
        moved = ids[text].clone()
        moved[order] = ids[text, 1:11]
        after = model(moved[None], output_attentions=True).attentions[1][0, 1, -1].detach()
        one, stay, follow = weights[text, -1, 1:11], after[1:11], after[order]
        for row, other in enumerate((stay, follow)):
            a, b = one - one.mean(), other - other.mean()
            sums[row] += torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum()]).double()
    wanted = sums[:, 0] / (sums[:, 1] * sums[:, 2]).sqrt()
    found = [result.scores[name][1, 1].item() for name in ("positional", "symbolic")]
    assert found == pytest.approx(wanted.tolist(), abs=1e-5)


def test_offsets_and_sinks_are_those_of_the_mean_matrix():
    model, ids = tiny("llama"), tokens(5, 12)
    texts = [{"input_ids": ids}]
    result = head_classes(model, texts=texts, special_tokens=True, length=12)
    mean = text_average(model, texts, special_tokens=True).attention
    before = mean.diagonal(-1, -2, -1)[..., 1:].mean(-1)  # without the first key
    assert torch.allclose(result.scores["previous"], before, atol=1e-6)
    assert torch.allclose(result.scores["sink"], mean[..., 1:, 0].mean(-1), atol=1e-6)
    assert torch.allclose(result.interval("previous")[0], result.per_sample["previous"].mean(0), atol=0.2)


def test_batches_and_padding_do_not_change_scores():
    model, ids = tiny("bert"), tokens(4, 14)
    mask = torch.ones_like(ids)
    mask[2, 10:] = 0
    options = {"special_tokens": True, "length": 12, "progress": False}
    rows = [{"input_ids": row[None, : m.sum()]} for row, m in zip(ids, mask, strict=True)]
    one = head_classes(model, texts=[{"input_ids": ids, "attention_mask": mask}], **options)
    other = head_classes(model, texts=rows, batch_size=3, **options)
    for name, score in one.scores.items():
        assert torch.allclose(score, other.scores[name], atol=1e-5, equal_nan=True), name
    assert torch.allclose(one.position_share, other.position_share, atol=1e-5)


def test_one_layer_in_half_precision_is_scored():
    model = hf.LlamaModel(small(hf.LlamaConfig, num_hidden_layers=1, num_key_value_heads=1)).bfloat16()
    result = head_classes(model, length=16)
    assert result.scores["sink"].isfinite().all()
    assert result.source.dtype == "bfloat16"
    assert result.to_frame("layer")["layer"].tolist() == [0, 1]


# ---- weights


def test_symmetric_and_antisymmetric_products_have_symmetry_one_and_minus_one():
    query = torch.randn(3, 10, 4, dtype=torch.float64)
    turn = torch.tensor([[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1], [0, 0, -1, 0]], dtype=torch.float64)
    assert torch.allclose(symmetry(query, query), torch.ones(3).double())
    assert torch.allclose(symmetry(query, query @ turn), -torch.ones(3).double())


def test_scores_of_weights_are_those_of_the_whole_matrix():
    torch.manual_seed(0)
    query, key = torch.randn(2, 5, 60, 4, dtype=torch.float64)
    key[0, 3] *= 20  # a column
    query[1, 7] *= 20
    product = query @ key.mT
    one, other = (product + product.mT) / 2, (product - product.mT) / 2
    norms = [each.square().sum((1, 2)) for each in (one, other, product)]
    assert torch.allclose(symmetry(query, key), (norms[0] - norms[1]) / norms[2])
    columns, rows = product.norm(dim=1), product.norm(dim=2)
    excess = [
        (each - each.mean(-1, keepdim=True) - 2 * each.std(-1, keepdim=True)).clamp(min=0).sum(-1)
        for each in (columns, rows)
    ]
    found = direction(query, key)
    assert torch.allclose(found, (excess[0] - excess[1]) / (excess[0] + excess[1]))
    assert found[0] > 0.5 > -0.5 > found[1]


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "deberta", "bloom"])
def test_weights_of_every_known_family_are_read_or_are_nan_with_a_reason(name):
    scores, reason = weight_scores(SequenceModel.of(tiny(name)))
    assert bool(scores.isnan().any()) == bool(reason) or not scores.numel()
    assert reason or scores.abs().max() <= 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_grouped_queries_are_those_of_the_projections(dtype):
    config = small(hf.Qwen2Config, num_attention_heads=4, num_key_value_heads=2)
    model = hf.Qwen2Model(config).to(dtype)
    layer = model.layers[1].self_attn
    with torch.no_grad():
        layer.q_proj.bias.fill_(100)
    size = layer.head_dim
    query = layer.q_proj.weight.double().view(4, size, -1).mT
    key = layer.k_proj.weight.double().view(2, size, -1).mT.repeat_interleave(2, 0)
    scores, reason = weight_scores(SequenceModel.of(model))
    assert not reason
    assert torch.allclose(scores[0, 1], symmetry(query, key), atol=0.05 if dtype == torch.bfloat16 else 1e-5)


def test_weights_behind_a_norm_and_of_unknown_families_are_nan_with_a_reason():
    config = small(hf.Qwen3Config, head_dim=8, num_key_value_heads=1)
    result = head_classes(hf.Qwen3Model(config), length=8)
    assert result.scores["symmetry"].isnan().all()
    assert "not linear" in result.notes[0]
    assert "not known" in by_hand().notes[0]
    assert by_hand().notes[1].endswith("returns no hidden states")


# ---- hidden states


def test_the_share_of_position_is_that_of_states_drawn_with_it():
    torch.manual_seed(0)
    position, sums = torch.randn(1, 1, 20, 400).double(), StateSums()
    for scale in (3.0, 3.0):
        states = position + scale**0.5 * torch.randn(1, 30, 20, 400).double()
        sums.add(states, torch.ones(30, 20, dtype=torch.bool))
    share, _ = sums.share_and_rank()
    assert share.item() == pytest.approx(0.25, abs=0.01)


def test_the_effective_rank_is_the_number_of_directions_of_positions():
    position = torch.randn(20, 30).double()
    position = position - position.mean(0)
    left, _, right = torch.linalg.svd(position, full_matrices=False)
    states = (left[:, :3] @ right[:3]).expand(1, 4, 20, 30)
    sums = StateSums()
    sums.add(states, torch.ones(4, 20, dtype=torch.bool))
    share, rank = sums.share_and_rank()
    assert share.item() == pytest.approx(1)
    assert rank.item() == pytest.approx(3, abs=1e-6)


# ---- results, arguments


def test_frames_have_a_row_for_each_head_and_each_layer():
    result = head_classes(tiny("bert"), length=8, layers=[2, 0], permutations=1)
    frame = result.to_frame()
    assert frame[["layer", "head"]].to_numpy().tolist() == [[2, 0], [2, 1], [0, 0], [0, 1]]
    assert frame["previous"][1] == result.scores["previous"][0, 1]
    layers = result.to_frame("layer")
    assert layers["layer"].tolist() == [0, 1, 2, 3]  # the last is the output
    assert layers[["other", "sink", "self"]].sum().sum() <= 4
    assert layers["position_share"].notna().all()
    with pytest.raises(ValueError, match="by must be"):
        result.to_frame("text")
    with pytest.raises(ValueError, match="score must be"):
        result.interval("positional")


def test_the_model_comes_back_as_it_was_and_the_seed_says_all():
    model = tiny("gpt2").train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    one, other, third = (head_classes(model, length=8, seed=seed).scores for seed in (0, 0, 1))
    assert model.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(torch.equal(one[name].nan_to_num(9), other[name].nan_to_num(9)) for name in one)
    assert not torch.equal(one["duplicate"], third["duplicate"])


def test_attached_encodings_are_measured_and_the_weights_are_those_of_the_model():
    model = tiny("bert")
    plain = head_classes(model, length=16)
    with attach(model, ALiBi(heads=2)):
        result = head_classes(model, length=16)
    assert torch.equal(result.scores["symmetry"], plain.scores["symmetry"])
    assert not torch.allclose(result.scores["previous"], plain.scores["previous"])
    assert result.source.encoding.startswith("ALiBi")


@pytest.mark.parametrize("name", ["gpt_oss", "mistral"])
def test_learned_sinks_count_as_sinks_and_windows_hide_duplicates(name):
    if name == "gpt_oss":
        config = small(hf.GptOssConfig, head_dim=8, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=1)
        model = hf.GptOssModel(config)
        with torch.no_grad():
            for layer in model.layers:
                layer.self_attn.sinks.fill_(30.0)
        scores = head_classes(model, length=16).scores
        assert scores["sink"].min() > 0.99
        return
    config = small(hf.MistralConfig, sliding_window=4, num_key_value_heads=1)
    scores = head_classes(hf.MistralModel(config), length=24).scores
    assert scores["duplicate"].abs().max() == scores["induction"].abs().max() == 0
    assert scores["offset"].min() >= -3
    assert scores["positional"].isfinite().all()


def test_what_cannot_be_scored_is_refused_with_the_way_out():
    images = SequenceModel(nn.Linear(2, 2), inputs=lambda sample, n: torch.zeros(1, n, 2))
    short = {"texts": [{"input_ids": tokens(2, 3)}], "special_tokens": True}
    for model, arguments, reason in [
        (tiny("bert"), {"length": 64}, "at most 40"),
        (SequenceModel(ByHand(), vocabulary_size=12), {"length": 64}, "vocabulary has 12"),
        (tiny("bert"), {"length": 4}, "length"),
        (tiny("bert"), short, "at least 4 tokens"),
        (tiny("bert"), {"texts": []}, "texts"),
        (images, {}, "reads no token ids"),
    ]:
        with pytest.raises(ValueError, match=reason):
            head_classes(model, **{"length": 8} | arguments)
