"""The callbacks train as the trainers do without them, and log the figures of their plans."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memplan
from benchmarks.program_run import load_torchvision
from memplan.errors import UnknownName
from tests.slow import slow

load_torchvision()
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


# -- transformers ------------------------------------------------------------------------------------------


def _trained(folder: Path, how: str, **options: Any) -> tuple[Any, Any, nn.Module]:
    """A Trainer after three steps and an evaluation, the callback if there is one, and the model."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50, "max_position_embeddings": 16}
    net = BertForSequenceClassification(BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes))
    data = [{"input_ids": torch.randint(50, (8,)), "labels": i % 2, "unused": i} for i in range(12)]
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4, use_cpu=True,
        report_to=[], logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
        **{"save_strategy": "no", **options},
    )  # fmt: skip
    callback = None
    model: Any = net
    if how == "callback":
        from memplan.integrations.transformers import MemplanCallback

        callback = MemplanCallback(save_plans=folder / "plans")
    if how == "compile":
        ids = torch.zeros(4, 8, dtype=torch.long)
        model = memplan.compile(net, {"input_ids": ids, "labels": ids[:, 0]}, on_mismatch="replan")
    callbacks = [] if callback is None else [callback]
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train()
    return trainer, callback, net


def _both_ways(loops: Iterable[str]) -> list[Any]:
    """Each loop with the callback and with `memplan.compile`; one of them is slow, in turns."""
    ways = ("callback", "compile")
    return [
        (loop, how) if i % 2 == k else slow(loop, how) for i, loop in enumerate(loops) for k, how in enumerate(ways)
    ]


LOOPS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "clipping": {"max_grad_norm": 0.01},
    "bf16": {"bf16": True},
    "resume": {"save_strategy": "steps", "save_steps": 2},
}


@pytest.mark.parametrize(("loop", "how"), _both_ways(LOOPS))
def test_loops_of_the_trainer_of_transformers(tmp_path: Path, loop: str, how: str) -> None:
    pytest.importorskip("accelerate", reason="pip install 'memplan[programs]'")
    logs, models = [], []
    for h in (how, "eager"):
        trainer, _, model = _trained(tmp_path / h, h, **LOOPS[loop])
        if loop == "resume":
            trainer.train(resume_from_checkpoint=str(tmp_path / h / "checkpoint-2"))
        logs.append([(e["step"], e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e])
        models.append(model)
    assert logs[0] == logs[1]
    assert len(logs[0]) >= 3
    assert loop != "clipping" or logs[0][0][2] > 0.01, "nothing was clipped"
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize("how", ["callback", "compile"])
def test_the_trainer_of_transformers_trains_and_evaluates_as_without(tmp_path: Path, how: str) -> None:
    pytest.importorskip("accelerate", reason="pip install 'memplan[programs]'")
    (trainer, callback, model), (eager, _, expected) = (_trained(tmp_path / h, h) for h in (how, "eager"))
    assert trainer.evaluate()["eval_loss"] == eager.evaluate()["eval_loss"]
    assert trainer.label_names == eager.label_names == ["labels"]
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (trainer, eager)]
    assert losses[0] == losses[1]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    if callback is not None:
        assert callback.figures["memplan/arena_bytes"] > 0
        with_loss = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(with_loss) == 3
        assert [entry["memplan/planned_bytes"] for entry in with_loss] == [callback.plans[0].total] * 3, with_loss
        assert memplan.load(tmp_path / how / "plans" / "graph-0.json").total == callback.plans[0].total
        assert (tmp_path / how / "plans" / "largest.html").exists()


# -- Lightning ---------------------------------------------------------------------------------------------


FITS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "checkpointing": {},
    "clipping": {"gradient_clip_val": 0.01},
    "bf16": {"precision": "bf16-mixed"},
    "resume": {},
}


class Blocks(nn.Module):
    """Two blocks, each in an activation checkpoint if that is asked for."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return x


def _fit(
    loop: str, how: str, folder: Path, modules: list[str] | None = None
) -> tuple[list[Tensor], nn.Module, dict[str, Any]]:
    """Fit for an epoch by Lightning, and for another from its checkpoint to resume.

    Returns losses, the network, and what the callback has logged. `modules`: what it compiles.
    """
    import lightning.pytorch as pl

    torch.manual_seed(0)
    net, data = Blocks(checkpoints=loop == "checkpointing"), torch.randn(14, 8)
    called = memplan.compile(net, data[:4]) if how == "compile" else net
    losses: list[Tensor] = []

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = called

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.net(batch).square().mean()
            losses.append(loss.detach().clone())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    callbacks: list[Any] = []
    if how == "callback":
        from memplan.integrations.lightning import MemplanCallback

        callbacks.append(MemplanCallback(modules, save_plans=folder / "plans"))
    module, loader = Lit(), torch.utils.data.DataLoader([*data], batch_size=4)  # type: ignore[arg-type,var-annotated]

    def fit(epochs: int, **options: Any) -> Any:
        trainer = pl.Trainer(
            max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
            enable_model_summary=False, callbacks=callbacks, **FITS[loop],
        )  # fmt: skip
        trainer.fit(module, loader, **options)
        return trainer

    first = fit(1)
    if loop == "resume":
        first.save_checkpoint(folder / f"{how}.ckpt")
        with torch.no_grad():
            net.get_parameter("blocks.0.0.weight").zero_()  # the checkpoint has it
        fit(2, ckpt_path=str(folder / f"{how}.ckpt"))
    return losses, net, callbacks[0].figures if callbacks else {}


@pytest.mark.parametrize(("loop", "how"), _both_ways(FITS))
def test_loops_of_lightning(tmp_path: Path, loop: str, how: str) -> None:
    pytest.importorskip("lightning", reason="pip install 'memplan[programs]'")
    (losses, net, figures), (expected, eager, _) = (_fit(loop, h, tmp_path) for h in (how, "eager"))
    assert len(losses) == len(expected) == (8 if loop == "resume" else 4)
    assert all(map(torch.equal, losses, expected))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), eager.parameters(), strict=True))
    if how == "callback":
        assert figures["memplan/graphs"] >= 1
        assert (tmp_path / "plans" / "largest.html").exists()


def test_a_submodule_may_be_compiled_and_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="pip install 'memplan[programs]'")
    (losses, _, figures), (expected, _, _) = (_fit("bf16", h, tmp_path, ["net"]) for h in ("callback", "eager"))
    assert figures["memplan/graphs"] >= 1
    assert all(map(torch.equal, losses, expected))
    with pytest.raises(UnknownName, match="is no submodule") as caught:
        _fit("bf16", "callback", tmp_path, ["encoder"])
    assert caught.value.hint == "its direct submodules are: net"
