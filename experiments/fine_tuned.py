"""Tasks on fine-tuned models: all weights are trained, and a linear layer on the mean of the last hidden states.

Pairs are one text, their sentences separated as the tokenizer does it.
"""

import copy
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments, set_seed

from experiments.sentence_tasks import Task, score


class LinearHead(nn.Module):
    """An encoder and a linear layer on its means, or its first token; one output is a number, several are classes."""

    def __init__(self, encoder: nn.Module, outputs: int, *, first: bool = False) -> None:
        super().__init__()
        self.encoder, self.first = encoder, first
        self.linear = nn.Linear(encoder.config.hidden_size, outputs)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        states = self.encoder(input_ids, attention_mask=attention_mask, **segments).last_hidden_state
        seen = attention_mask[..., None]
        logits = self.linear(states[:, 0] if self.first else (states * seen).sum(1) / seen.sum(1))
        if logits.shape[-1] == 1:
            return {"loss": mse_loss(logits[:, 0], labels.to(logits.dtype)), "logits": logits}
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def fine_tuned_scores(
    task: Task, model: nn.Module, tokenizer: Any, seed: int, *, epochs: int = 3, bf16: bool = False
) -> dict[str, float]:
    """Return the score of a task with a fixed split, and the changes of accuracy under its perturbations."""
    numbers = task.labels.dtype.kind == "f"
    classes = np.unique(task.labels)
    targets = task.labels if numbers else np.searchsorted(classes, task.labels)
    longest = min(128, model.config.max_position_embeddings)

    def rows(columns: Sequence[Sequence[str]], which: np.ndarray) -> list[dict[str, Any]]:
        given = tokenizer(*(list(column) for column in columns), truncation=True, max_length=longest)
        names = [name for name in given if name != "token_type_ids"]
        return [
            {name: given[name][i] for name in names} | {"labels": target} for i, target in enumerate(which.tolist())
        ]

    def part(chosen: np.ndarray) -> list[dict[str, Any]]:
        return rows([[column[i] for i in np.flatnonzero(chosen)] for column in task.texts], targets[chosen])

    set_seed(seed)
    learner = LinearHead(copy.deepcopy(model), 1 if numbers else len(classes)).to(model.device)
    with TemporaryDirectory() as folder:
        options = {"num_train_epochs": epochs, "learning_rate": 1e-4, "warmup_steps": 0.1, "seed": seed, "bf16": bf16}
        options |= {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 128, "save_strategy": "no"}
        options |= {"report_to": "none", "disable_tqdm": True, "use_cpu": model.device.type == "cpu"}
        options |= {"remove_unused_columns": False, "dataloader_pin_memory": False, "logging_strategy": "no"}
        collator = DataCollatorWithPadding(tokenizer)
        arguments = TrainingArguments(output_dir=folder, **options)
        trainer = Trainer(learner, arguments, train_dataset=part(~task.test), data_collator=collator)
        trainer.remove_callback(PrinterCallback)  # which a Trainer without a progress bar has
        trainer.train()

        def predicted(given: list[dict[str, Any]]) -> np.ndarray:
            logits = trainer.predict(given).predictions
            return logits[:, 0] if numbers else classes[logits.argmax(-1)]

        before = np.empty_like(task.labels)
        before[task.test] = predicted(part(task.test))
        found = {f"{task.name}, fine-tuned": score(task.name, task.labels[task.test], before[task.test])}
        for name, (places, texts) in task.perturbed.items():
            if len(places):
                after = predicted(rows([texts, [task.texts[1][i] for i in places]], targets[places]))
                right = [(which == task.labels[places]).mean() for which in (before[places], after)]
                found[f"NLI fine-tuned, {name}"] = float(right[1] - right[0])
    return found
