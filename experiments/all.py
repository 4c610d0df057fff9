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
FAMILIES = "--family bert deberta-v2 mpnet modernbert xlnet"
# the command of each study at full size, with {data} for the folder of the files; and to see it run
STUDIES = {
    "attenuated_sweep": ("attenuated_sweep.py", "attenuated_sweep.py"),
    "hand_made_encodings": (
        "hand_made_encodings.py --text {data}/wikitext2_valid.txt",
        "hand_made_encodings.py --smoke",
    ),
    "vit_grid": ("vit_grid.py {data}/pe_matrices/vit_tiny_patch16_224_pos_qk.npz", "vit_grid.py --smoke"),
    "real_minilm": ("real_models.py minilm --text {data}/wikitext2_valid.txt", "real_models.py --smoke"),
    "real_mpnet": ("real_models.py mpnet --text {data}/wikitext2_valid.txt", "real_models.py --smoke"),
    "real_smollm2": ("real_models.py smollm2 --text {data}/wikitext2_valid.txt", "real_models.py --smoke"),
    "rotations": ("rotations.py smollm2 --text {data}/wikitext2_valid.txt", "rotations.py --smoke"),
    "rotations_small": ("rotations.py small", "rotations.py --smoke"),
    "rotary_dial": (
        "rotary_dial.py smollm2 --text {data}/wikitext2_valid.txt --frames {data}/ewt_train.jsonl",
        "rotary_dial.py --smoke",
    ),
    "needles": (
        "needles.py smollm2 --text {data}/wikitext2_valid.txt --train {data}/books.txt.gz",
        "needles.py --smoke",
    ),
    "heads_minilm": ("head_classes.py minilm --text {data}/wikitext2_valid.txt", "head_classes.py --smoke"),
    "heads_smollm2": ("head_classes.py smollm2 --text {data}/wikitext2_valid.txt", "head_classes.py --smoke"),
    "depth": ("depth.py --text {data}/wikitext2_valid.txt", "depth.py --smoke"),
    "depth_in_training": ("depth_in_training.py --text {data}/wikitext2_valid.txt", "depth_in_training.py --smoke"),
    "simulated_statistics": ("simulated_statistics.py", "simulated_statistics.py --smoke"),
    "dependency_heads": (
        "dependency_heads.py {data}/ewt_dev.jsonl {data}/en_pud-slim.conllu --model minilm mpnet smollm2",
        "dependency_heads.py --smoke",
    ),
    "decoder_minimal_pairs": (
        "decoder_minimal_pairs.py {data}/ewt_dev.jsonl --pairs {data}/snli_dev_subset.jsonl --text {data}/books.txt.gz",
        "decoder_minimal_pairs.py --smoke",
    ),
    "order_without_positions": (
        "order_without_positions.py {data}/ewt_train.jsonl {data}/ewt_dev.jsonl --pairs {data}/snli_dev_subset.jsonl "
        "--text {data}/books.txt.gz",
        "order_without_positions.py --smoke",
    ),
    "positions_in_training": (
        "positions_in_training.py --text {data}/books.txt.gz --width 256 --learning-rate 5e-4 --steps 5000 "
        "--seeds 0 1 2 3 4",
        "positions_in_training.py --smoke",
    ),
    "positions_of_families": (
        f"positions_in_training.py --text {{data}}/books.txt.gz {FAMILIES} --batch 16 --steps 2000",
        f"positions_in_training.py --smoke {FAMILIES}",
    ),
    "decoders_in_training": (
        "decoders_in_training.py --text {data}/books.txt.gz --batch 16",
        "decoders_in_training.py --smoke",
    ),
    "relocated_positions": ("relocated_positions.py --text {data}/books.txt.gz", "relocated_positions.py --smoke"),
    "relocated_forms": (
        "relocated_positions.py --text {data}/books.txt.gz --tokens 100000 "
        "--cells none 'fixed form' 'learnable form' 'shared form'",
        "relocated_positions.py --smoke --cells none 'fixed form' 'learnable form' 'shared form'",
    ),
    "relocated_decoder": (
        "relocated_decoder.py --text {data}/books.txt.gz --batch 16",
        "relocated_decoder.py --smoke",
    ),
    "downstream_accuracy": (
        "downstream_accuracy.py --text {data}/books.txt.gz --senteval {data}/sentcls --glue {data}/glue "
        "--frames {data}/ewt_train.jsonl --nli {data}/snli_dev_full.jsonl {data}/mnli_dev.jsonl "
        "--pairs {data}/snli_dev_subset.jsonl --bf16",
        "downstream_accuracy.py --smoke",
    ),
    "encoding_forms": (
        "encoding_forms.py --text {data}/books.txt.gz --frames {data}/ewt_train.jsonl --senteval {data}/sentcls",
        "encoding_forms.py --smoke",
    ),
    "encoding_grid": ("encoding_grid.py --text {data}/books.txt.gz", "encoding_grid.py --smoke"),
    "shuffle_swap_snli": (
        "shuffle_swap_snli.py {data}/snli_dev_subset.jsonl --train {data}/snli_dev_full.jsonl {data}/mnli_dev.jsonl "
        "--bf16 --side premise hypothesis",
        "shuffle_swap_snli.py --smoke",
    ),
    "role_swap_training": (
        "role_swap_training.py --text {data}/books.txt.gz --bf16 --parsed {data}/snli_dev_subset.jsonl "
        "--train {data}/snli_dev_full.jsonl {data}/mnli_dev.jsonl --parse {data}/mnli_dev.jsonl "
        "--frames {data}/ewt_train.jsonl {data}/ewt_dev.jsonl",
        "role_swap_training.py --smoke",
    ),
    "stability": ("stability.py --text {data}/books.txt.gz --glue {data}/glue --bf16", "stability.py --smoke"),
}
# what prints the tables of each page again from the numbers in docs/results: page, script, files
PUBLISHED = (
    ("encodings", "hand_made_encodings", "hand_made_encodings.csv"),
    ("pretrained", "real_models", "real_models.csv"),
    ("training", "positions_in_training", "positions_in_training.csv"),
    ("training", "positions_in_training", "positions_of_families/*.csv"),
    ("training", "encoding_grid", "encoding_grid.csv"),
    ("decoders", "order_without_positions", "order_without_positions.csv"),
    ("decoders", "decoder_minimal_pairs", "decoder_minimal_pairs.csv"),
    ("decoders", "decoders_in_training", "decoders_in_training.csv"),
    ("rotations", "rotations", "rotations_smollm2_kernels.csv"),
    ("rotations", "rotations", "rotations_smollm2_quarters.csv"),
    ("rotations", "rotations", "rotations_small_kernels.csv"),
    ("rotations", "rotary_dial", "rotary_dial_smollm2.csv"),
    ("needles", "needles", "needles_smollm2.csv"),
    ("depth", "depth", "depth_[ms]*.csv"),
    ("state_space", "depth_in_training", "depth_in_training.csv"),
    ("forms", "encoding_forms", "encoding_forms.csv"),
    ("forms", "encoding_forms", "encoding_forms_minilm.csv"),
    ("vision", "vit_grid", "vit_digits.csv"),
    ("heads", "head_classes", "head_classes_smollm2.csv"),
    ("heads", "head_classes", "head_classes_minilm.csv"),
    ("relocation", "relocated_positions", "relocated_positions.csv"),
    ("relocation", "relocated_positions", "relocated_positions_mpnet.csv"),
    ("relocation", "relocated_decoder", "relocated_decoder.csv"),
    ("downstream", "downstream_accuracy", "downstream_accuracy.csv"),
    ("fine_tuned", "downstream_accuracy", "downstream_fine_tuned.csv"),
    ("from_nothing", "downstream_accuracy", "downstream_from_nothing.csv"),
    ("role_swap_training", "role_swap_training", "role_swap_answers.csv"),
    ("stability", "stability", "stability.csv"),
    ("dependencies", "dependency_heads", "dependency_heads.csv"),
    ("role_swaps", "role_swap_rounds", "role_swap_rounds.csv"),
    ("shuffles", "shuffle_swap_snli", "shuffles_*.csv"),
)
WITHOUT_FILES = ("simulated_statistics",)  # print, and write nothing


def commands(names: list[str], data: Path | None, output: Path, smoke: bool) -> dict[str, list[str]]:
    """Return the words of each study's command.

    Raises:
        FileNotFoundError: a file that a study reads is not in the folder.
    """
    found = {}
    for name in names:
        script, *flags = shlex.split(STUDIES[name][smoke].replace("{data}", str(data)))
        missing = [flag for flag in flags if data and flag.startswith(str(data)) and not Path(flag).exists()]
        if missing:
            raise FileNotFoundError(f"{name} needs {', '.join(missing)}; docs/results/data.md says where it is from")
        to = [] if name in WITHOUT_FILES else ["--output", str(output / name)]
        found[name] = [sys.executable, str(HERE / script), *flags, *to]
    return found


def print_published(folder: Path, output: Path) -> None:
    """Print the tables of every page from the committed numbers, and draw their figures into a folder."""
    for page, script, files in PUBLISHED:
        command = [sys.executable, str(HERE / f"{script}.py"), "--output", str(output), "--results"]
        print(f"\n# {page}: {script}.py, {files}\n", flush=True)
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
