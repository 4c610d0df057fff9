"""Run every study, or those that are named.

    python -m experiments.all --smoke --output smoke                    # tiny models on examples/data
    python -m experiments.all --data FOLDER --output runs               # the files: docs/results/data.md
    python -m experiments.all --data FOLDER --output runs --only encoding_grid
    python -m experiments.all --data FOLDER --output runs --jobs 4      # side by side: on a GPU
    python -m experiments.all --results docs/results                    # the published tables, from committed numbers

Says first how long it will take, by `times.csv`. What a study prints is kept as OUTPUT/STUDY.md once it is complete; a
study that has one is not repeated, and one that was cut off resumes where its script can. A folder holds the studies of
one --data, or those of --smoke.
"""

import argparse
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from experiments.runs import claim

HERE = Path(__file__).parent
# the command of each study at full size, with {data} for the folder of the files
STUDIES = {
    # the claims of the paper
    "dependency_heads": (
        "paper.dependency_heads {data}/ewt_dev.jsonl {data}/en_pud-slim.conllu --model minilm mpnet smollm2"
    ),
    "positions_in_training": (
        "paper.positions_in_training --text {data}/books.txt.gz --width 256 --learning-rate 5e-4 --steps 5000 "
        "--seeds 0 1 2 3 4"
    ),
    "positions_of_families": (
        "paper.positions_in_training --text {data}/books.txt.gz --family bert deberta-v2 mpnet modernbert "
        "xlnet --batch 16 --steps 2000"
    ),
    "downstream_accuracy": (
        "paper.downstream_accuracy --text {data}/books.txt.gz --senteval {data}/sentcls --glue {data}/glue "
        "--frames {data}/ewt_train.jsonl --nli {data}/snli_dev_full.jsonl {data}/mnli_dev.jsonl --pairs "
        "{data}/snli_dev_subset.jsonl --bf16"
    ),
    "encoding_forms": (
        "paper.encoding_forms --text {data}/books.txt.gz --frames {data}/ewt_train.jsonl --senteval {data}/sentcls"
    ),
    "fair_test": "paper.fair_test --text {data}/books.txt.gz --senteval {data}/sentcls --frames {data}/ewt_train.jsonl",
    "encoding_grid": "paper.encoding_grid --text {data}/books.txt.gz",
    "shuffle_swap_snli": (
        "paper.shuffle_swap_snli {data}/snli_dev_subset.jsonl --train {data}/snli_dev_full.jsonl "
        "{data}/mnli_dev.jsonl --bf16 --side premise hypothesis"
    ),
    # beyond the paper
    "attenuated_sweep": "beyond.attenuated_sweep",
    "hand_made_encodings": "beyond.hand_made_encodings --text {data}/wikitext2_valid.txt",
    "vit_grid": "beyond.vit_grid {data}/pe_matrices/vit_tiny_patch16_224_pos_qk.npz",
    "real_minilm": "beyond.real_models minilm --text {data}/wikitext2_valid.txt",
    "real_mpnet": "beyond.real_models mpnet --text {data}/wikitext2_valid.txt",
    "real_smollm2": "beyond.real_models smollm2 --text {data}/wikitext2_valid.txt",
    "rotations": "beyond.rotations smollm2 --text {data}/wikitext2_valid.txt",
    "rotations_small": "beyond.rotations small",
    "rotary_dial": "beyond.rotary_dial smollm2 --text {data}/wikitext2_valid.txt --frames {data}/ewt_train.jsonl",
    "order_use": "beyond.order_use --model minilm mpnet smollm2 --text {data}/wikitext2_valid.txt",
    "needles": "beyond.needles smollm2 --text {data}/wikitext2_valid.txt --train {data}/books.txt.gz",
    "heads_minilm": "beyond.head_classes minilm --text {data}/wikitext2_valid.txt",
    "heads_smollm2": "beyond.head_classes smollm2 --text {data}/wikitext2_valid.txt",
    "depth": "beyond.depth --text {data}/wikitext2_valid.txt",
    "slots": "beyond.slots --text {data}/wikitext2_valid.txt",
    "depth_in_training": "beyond.depth_in_training --text {data}/wikitext2_valid.txt",
    "simulated_statistics": "beyond.simulated_statistics",
    "decoder_minimal_pairs": (
        "beyond.decoder_minimal_pairs {data}/ewt_dev.jsonl --pairs {data}/snli_dev_subset.jsonl --text "
        "{data}/books.txt.gz"
    ),
    "order_without_positions": (
        "beyond.order_without_positions {data}/ewt_train.jsonl {data}/ewt_dev.jsonl --pairs "
        "{data}/snli_dev_subset.jsonl --text {data}/books.txt.gz"
    ),
    "reversible_swaps": (
        "beyond.reversible_swaps {data}/ewt_train.jsonl {data}/ewt_dev.jsonl --pairs {data}/snli_dev_subset.jsonl "
        "--plain {data}/snli_dev_full.jsonl {data}/mnli_dev.jsonl --text {data}/books.txt.gz --novels 8000"
    ),
    "decoders_in_training": "beyond.decoders_in_training --text {data}/books.txt.gz --batch 16",
    "relocated_positions": "beyond.relocated_positions --text {data}/books.txt.gz",
    "relocated_forms": (
        "beyond.relocated_positions --text {data}/books.txt.gz --tokens 100000 --cells none 'fixed form' "
        "'learnable form' 'shared form'"
    ),
    "relocated_decoder": "beyond.relocated_decoder --text {data}/books.txt.gz --batch 16",
    "role_swap_training": (
        "beyond.role_swap_training --text {data}/books.txt.gz --bf16 --parsed {data}/snli_dev_subset.jsonl "
        "--train {data}/snli_dev_full.jsonl {data}/mnli_dev.jsonl --parse {data}/mnli_dev.jsonl --frames "
        "{data}/ewt_train.jsonl {data}/ewt_dev.jsonl"
    ),
    "stability": "beyond.stability --text {data}/books.txt.gz --glue {data}/glue --bf16",
}
# the commands that show that a study runs, where they are more than its module and --smoke
SMOKE = {
    "positions_of_families": "paper.positions_in_training --smoke --family bert deberta-v2 mpnet modernbert xlnet",
    "attenuated_sweep": "beyond.attenuated_sweep",
    "relocated_forms": "beyond.relocated_positions --smoke --cells none 'fixed form' 'learnable form' 'shared form'",
}
# what prints the tables of each page again from the numbers in docs/results: page, module, files
PUBLISHED = (
    ("encodings", "beyond.hand_made_encodings", "hand_made_encodings.csv"),
    ("pretrained", "beyond.real_models", "real_models.csv"),
    ("training", "paper.positions_in_training", "positions_in_training.csv"),
    ("training", "paper.positions_in_training", "positions_of_families/*.csv"),
    ("training", "paper.encoding_grid", "encoding_grid.csv"),
    ("decoders", "beyond.order_without_positions", "order_without_positions.csv"),
    ("decoders", "beyond.decoder_minimal_pairs", "decoder_minimal_pairs.csv"),
    ("decoders", "beyond.reversible_swaps", "reversible_swaps.csv"),
    ("decoders", "beyond.decoders_in_training", "decoders_in_training.csv"),
    ("rotations", "beyond.rotations", "rotations_smollm2_kernels.csv"),
    ("rotations", "beyond.rotations", "rotations_smollm2_quarters.csv"),
    ("rotations", "beyond.rotations", "rotations_small_kernels.csv"),
    ("rotations", "beyond.rotary_dial", "rotary_dial_smollm2.csv"),
    ("needles", "beyond.needles", "needles_smollm2.csv"),
    ("depth", "beyond.depth", "depth_[ms]*.csv"),
    ("slots", "beyond.slots", "slots.csv"),
    ("order_use", "beyond.order_use", "order_use*.csv"),
    ("state_space", "beyond.depth_in_training", "depth_in_training.csv"),
    ("forms", "paper.encoding_forms", "encoding_forms.csv"),
    ("forms", "paper.encoding_forms", "encoding_forms_minilm.csv"),
    ("vision", "beyond.vit_grid", "vit_digits.csv"),
    ("heads", "beyond.head_classes", "head_classes_smollm2.csv"),
    ("heads", "beyond.head_classes", "head_classes_minilm.csv"),
    ("relocation", "beyond.relocated_positions", "relocated_positions.csv"),
    ("relocation", "beyond.relocated_positions", "relocated_positions_mpnet.csv"),
    ("relocation", "beyond.relocated_decoder", "relocated_decoder.csv"),
    ("downstream", "paper.downstream_accuracy", "downstream_accuracy.csv"),
    ("fine_tuned", "paper.downstream_accuracy", "downstream_fine_tuned.csv"),
    ("from_nothing", "paper.downstream_accuracy", "downstream_from_nothing.csv"),
    ("role_swap_training", "beyond.role_swap_training", "role_swap_answers.csv"),
    ("stability", "beyond.stability", "stability.csv"),
    ("dependencies", "paper.dependency_heads", "dependency_heads.csv"),
    ("role_swaps", "beyond.role_swap_rounds", "role_swap_rounds.csv"),
    ("shuffles", "paper.shuffle_swap_snli", "shuffles_*.csv"),
)
WITHOUT_FILES = ("simulated_statistics",)  # print, and write nothing


def commands(names: list[str], data: Path | None, output: Path, smoke: bool) -> dict[str, list[str]]:
    """Return the words of each study's command.

    Raises:
        FileNotFoundError: a file that a study reads is not in the folder.
    """
    found = {}
    for name in names:
        command = SMOKE.get(name, f"{STUDIES[name].split()[0]} --smoke") if smoke else STUDIES[name]
        module, *flags = shlex.split(command.replace("{data}", str(data)))
        missing = [flag for flag in flags if data and flag.startswith(str(data)) and not Path(flag).exists()]
        if missing:
            raise FileNotFoundError(f"{name} needs {', '.join(missing)}; docs/results/data.md says where it is from")
        to = [] if name in WITHOUT_FILES else ["--output", str(output / name)]
        found[name] = [sys.executable, "-m", f"experiments.{module}", *flags, *to]
    return found


def print_published(folder: Path, output: Path) -> None:
    """Print the tables of every page from the committed numbers, and draw their figures into a folder."""
    for page, module, files in PUBLISHED:
        command = [sys.executable, "-m", f"experiments.{module}", "--output", str(output), "--results"]
        print(f"\n# {page}: experiments.{module}, {files}\n", flush=True)
        subprocess.run([*command, *map(str, sorted(folder.glob(files)))], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of the files that the published commands read")
    parser.add_argument("--output", type=Path, default=Path("outputs/all"), help="a folder for each study")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES), help="studies to run")
    parser.add_argument("--jobs", type=int, default=1, help="studies at a time")
    parser.add_argument("--smoke", action="store_true", help="tiny models on examples/data: to see all of it run")
    parser.add_argument("--results", type=Path, help="docs/results: print every published table again, run nothing")
    arguments = parser.parse_args()
    if arguments.results:
        return print_published(arguments.results, arguments.output)
    if not (arguments.smoke or arguments.data):
        parser.error("name the folder of the files with --data, or run --smoke")

    wanted = commands(arguments.only, arguments.data, arguments.output, arguments.smoke)
    claim(arguments.output, {"smoke": arguments.smoke, "data": arguments.data and str(arguments.data.resolve())})
    missing = [name for name in wanted if not (arguments.output / f"{name}.md").exists()]
    minutes = pd.read_csv(HERE / "times.csv", index_col="study")["smoke" if arguments.smoke else "full"]
    print(f"{len(missing)} of {len(wanted)} studies to run, about {minutes[missing].sum():.0f} minutes on two cores")

    def finished(name: str) -> bool:
        print(f"{name}: about {minutes[name]:g} minutes", flush=True)
        printed = arguments.output / f"{name}.md"
        unfinished = printed.with_suffix(".unfinished")
        with unfinished.open("w") as file:
            code = subprocess.run(wanted[name], stdout=file).returncode
        if not code:
            unfinished.rename(printed)
        return not code

    longest_first = sorted(missing, key=lambda name: -minutes[name]) if arguments.jobs > 1 else missing
    with ThreadPoolExecutor(arguments.jobs) as pool:
        failed = [name for name, done in zip(longest_first, pool.map(finished, longest_first), strict=True) if not done]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; run the same command again to resume them")


if __name__ == "__main__":
    main()
