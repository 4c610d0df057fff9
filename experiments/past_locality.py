"""Past-locality of a decoder while it trains: on running text, and on identical words after a first token."""

from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerCallback, TrainerState

from pelocality import past_locality, positional_attention, text_average

NAME = "past_locality.csv"


class PastLocality(TrainerCallback):
    """Write the past-locality of each layer, mean over heads, to a file: from the first step on, ever more rarely.

    Measured at steps 0, 1, 2, 4, 8, ... and every `every` steps. On text, it is that of the mean attention over `texts`
    (rows, n), with the share of attention that position explains. Identical words follow the first token of every text,
    which is cut out again: without it, a decoder without positions has equal states everywhere.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast, texts: Tensor, every: int):
        self.file, self.tokenizer, self.texts, self.every = folder / NAME, tokenizer, texts, every

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, *, model: Any, **_: Any) -> None:
        """Measure the untrained model."""
        if state.global_step == 0:
            self.file.unlink(missing_ok=True)
            self._measure(0, model)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, *, model: Any, **_: Any) -> None:
        """Measure at powers of two and at every so many steps."""
        step = state.global_step
        if step % self.every == 0 or step.bit_count() == 1:
            self._measure(step, model)

    def _measure(self, step: int, model: Any) -> None:
        options = {"length": self.texts.shape[1] - 1, "words": 16, "progress": False}
        words = positional_attention(model, self.tokenizer, prefix=self.tokenizer.cls_token, **options).attention
        mean = text_average(model, [{"input_ids": self.texts}], special_tokens=True, progress=False)
        text = mean.attention  # (layer, head, n, n)
        columns = {
            "identical_words": past_locality(words).mean(-1),
            "text": past_locality(text).mean(-1),
            "position_share": mean.share.mean(-1),
            "first_token": text[:, :, 1:, 0].mean((-2, -1)),  # its share of the attention of later tokens
        }
        rows = pd.DataFrame({name: values.tolist() for name, values in columns.items()}).rename_axis("layer")
        rows.reset_index().assign(step=step).to_csv(self.file, mode="a", header=not self.file.exists(), index=False)


def read(folder: Path) -> pd.DataFrame:
    """Return what was measured in a run; of steps repeated after a checkpoint, the last."""
    return pd.read_csv(folder / NAME).drop_duplicates(["step", "layer"], keep="last").sort_values(["step", "layer"])
