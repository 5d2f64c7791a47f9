"""Programs whose loop belongs to a library: the Trainer of transformers, accelerate, Lightning.

By the backend, the callbacks of `memplan.integrations` compile where there are some.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.program_run import NO_STEP, STEPS, Program, Run


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50, "max_position_embeddings": 32}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))


def _sentences(number: int) -> list[dict[str, Any]]:
    """Labelled sentences, with a column that the model does not take."""
    ids = torch.randint(50, (number, 8))
    mask = torch.ones(8, dtype=torch.long)
    return [{"input_ids": x, "attention_mask": mask, "labels": i % 2, "source": i} for i, x in enumerate(ids)]


def _train(run: Run, net: nn.Module, *, resume: bool = False, **options: Any) -> None:
    """Train by the Trainer, and evaluate on other batches, the last of them smaller."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            run.begin_step()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            run.end_step()

    data, batch = _sentences(8 * STEPS * 2), torch.zeros(8, 8, dtype=torch.long)
    callbacks: list[Any] = [Steps()]
    model: Any = net
    if run.way == "backend":
        callbacks.append(_callback(run))
    else:
        model = run.compile(net, input_ids=batch, attention_mask=torch.ones_like(batch), labels=batch[:, 0])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=8, per_device_eval_batch_size=16, use_cpu=True,
            report_to=[], logging_steps=1, disable_tqdm=True, seed=0, **{"save_strategy": "no", **options},
        )  # fmt: skip

        def trainer() -> Any:
            return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:20], callbacks=callbacks)

        running = trainer()
        running.train()
        if resume:
            running = trainer()
            running.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        for entry in running.state.log_history:
            if "loss" in entry:
                run.loss(torch.tensor([entry["loss"], entry["grad_norm"]]))
        run.result("test", running.evaluate()["eval_loss"])
    run.state(net)


def _callback(run: Run) -> Any:
    """Return the callback of memplan, whose backend becomes the run's."""
    from memplan.integrations.transformers import MemplanCallback

    callback = MemplanCallback()
    run.backend = callback.backend
    return callback


def hf_trainer(run: Run) -> None:
    """Train BERT by the Trainer of transformers, with gradients clipped."""
    _train(run, _bert(), max_grad_norm=0.5)


def hf_trainer_accumulation(run: Run) -> None:
    """Train BERT with two batches for each update."""
    _train(run, _bert(), gradient_accumulation_steps=2, warmup_steps=2)


def hf_trainer_bf16(run: Run) -> None:
    """Train BERT under autocast to bfloat16."""
    _train(run, _bert(), bf16=True)


def hf_trainer_checkpointing(run: Run) -> None:
    """Train BERT with activation checkpoints."""
    _train(run, _bert(), gradient_checkpointing=True)


def hf_trainer_resume(run: Run) -> None:
    """Train BERT, and once more from the checkpoint of the third step."""
    _train(run, _bert(), resume=True, save_strategy="steps", save_steps=3)


def hf_trainer_adafactor(run: Run) -> None:
    """Train BERT by Adafactor with label smoothing."""
    _train(run, _bert(), optim="adafactor", label_smoothing_factor=0.1)


def hf_trainer_causal(run: Run) -> None:
    """Train a Llama on sequences that a collator pads to other lengths in each batch."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50, "pad_token_id": 0}
    net = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **sizes))
    data = []
    for i in range(4 * STEPS):
        ids = torch.randint(1, 50, (8 + 2 * (i // 8),)).tolist()
        data.append({"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)})

    def collate(features: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(f["input_ids"]) for f in features)
        fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            key: torch.tensor([list(f[key]) + [fill] * (longest - len(f[key])) for f in features])
            for key, fill in fills.items()
        }

    callbacks: list[Any] = []
    model: Any = net
    batch = torch.zeros(4, 8, dtype=torch.long)
    if run.way == "backend":
        callbacks.append(_callback(run))
    else:
        model = run.compile(net, input_ids=batch, attention_mask=torch.ones_like(batch), labels=batch)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, report_to=[], logging_steps=1,
            disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=callbacks)
        trainer.train()
        for entry in trainer.state.log_history:
            if "loss" in entry:
                run.loss(torch.tensor(entry["loss"]))
    run.state(net)


class Classifier(nn.Module):
    """Two layers with a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _points(number: int) -> TensorDataset:
    return TensorDataset(torch.randn(number, 16), torch.randint(4, (number,)))


def _accelerate(run: Run, *, accumulate: int = 1, precision: str = "no") -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    net = Classifier()
    model = run.compile(net, torch.randn(8, 16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader(_points(8 * STEPS * accumulate), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    for inputs, targets in run.steps(loader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        run.result("test", model(torch.ones(8, 16)))
    run.state(net)


def accelerate_loop(run: Run) -> None:
    """Train by a loop of accelerate, with gradients clipped."""
    _accelerate(run)


def accelerate_accumulation(run: Run) -> None:
    """Train by a loop of accelerate that accumulates the gradients of two batches."""
    _accelerate(run, accumulate=2)


def accelerate_bf16(run: Run) -> None:
    """Train by a loop of accelerate in mixed precision."""
    _accelerate(run, precision="bf16")


def _fit(run: Run, *, inner: bool = False, resume: bool = False, automatic: bool = True, **options: Any) -> None:
    """Train by Lightning: `memplan.compile` compiles the network inside, as it takes no LightningModule's place."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Lit(pl.LightningModule):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net
            self.automatic_optimization = automatic

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x) if inner else self(x), y)
            self.log("loss", loss)
            run.loss(loss)
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("test", F.cross_entropy(self(x), y))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class Steps(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            run.begin_step()

        def on_train_batch_end(self, *args: Any) -> None:
            run.end_step()

    net = Classifier()
    callbacks: list[Any] = [Steps()]
    example = torch.randn(8, 16)
    if run.way == "backend":
        from memplan.integrations.lightning import MemplanCallback

        callback = MemplanCallback()
        run.backend = callback.backend
        callbacks.append(callback)
        module = Lit(net)
    else:
        module = Lit(run.compile(net, example))
    train, test = DataLoader(_points(8 * STEPS - 3), batch_size=8), DataLoader(_points(20), batch_size=10)

    def trainer(epochs: int) -> Any:
        return pl.Trainer(
            max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
            enable_model_summary=False, callbacks=callbacks, num_sanity_val_steps=0, **options,
        )  # fmt: skip

    fits = trainer(1)
    fits.fit(module, train, test)
    if resume:
        with tempfile.TemporaryDirectory() as folder:
            fits.save_checkpoint(f"{folder}/one.ckpt")
            fits = trainer(2)
            fits.fit(module, train, test, ckpt_path=f"{folder}/one.ckpt")
    run.result("test", fits.callback_metrics["test"])
    run.state(net)


def lightning_fit(run: Run) -> None:
    """Train by Lightning."""
    _fit(run)


def lightning_inner(run: Run) -> None:
    """Train by Lightning, where `training_step` calls the network inside, with clipping and accumulation."""
    _fit(run, inner=True, accumulate_grad_batches=2, gradient_clip_val=0.5)


def lightning_bf16(run: Run) -> None:
    """Train by Lightning in mixed precision."""
    _fit(run, precision="bf16-mixed")


def lightning_resume(run: Run) -> None:
    """Train by Lightning for an epoch, and for another from its checkpoint."""
    _fit(run, resume=True)


def lightning_manual(run: Run) -> None:
    """Train by Lightning with the update in `training_step`."""
    _fit(run, automatic=False)


_HF = ("transformers", "accelerate")
PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        **{
            run.__name__: Program(run=run, libraries=_HF, ways=NO_STEP)
            for run in (
                hf_trainer, hf_trainer_accumulation, hf_trainer_bf16, hf_trainer_checkpointing, hf_trainer_resume,
                hf_trainer_adafactor, hf_trainer_causal,
            )
        },
        **{
            run.__name__: Program(run=run, libraries=("accelerate",), ways=NO_STEP)
            for run in (accelerate_loop, accelerate_accumulation, accelerate_bf16)
        },
        **{
            run.__name__: Program(run=run, libraries=("lightning",), ways=NO_STEP)
            for run in (lightning_fit, lightning_inner, lightning_bf16, lightning_resume, lightning_manual)
        },
    }
)  # fmt: skip
