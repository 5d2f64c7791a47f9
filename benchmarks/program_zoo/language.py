"""Language and speech models: transformers and peft with random weights, and a nanoGPT; the loop is a user's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from benchmarks.program_run import NO_STEP, STEPS, Program, Run

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
Batch = dict[str, Tensor]


def _train(run: Run, net: nn.Module, batches: list[Batch], *, clip: float | None = 1.0) -> None:
    """Train a model that returns its loss, by the usual loop, and evaluate it."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    model = run.compile(net, **batches[0])
    if run.whole_step:
        step = run.compile_step(net, optimizer, lambda out: out.loss, (), batches[0], clip_grad_norm=clip)
    model.train()
    for batch in run.steps(batches):
        if run.whole_step:
            run.loss(step(**batch))
            continue
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        run.loss(loss)
    model.eval()
    with torch.no_grad():
        outputs = model(**batches[0])
    run.result("test", (outputs.loss, outputs.logits))
    run.state(net)


def _tokens(*, mask: bool = False) -> list[Batch]:
    batches = []
    for _ in range(STEPS):
        ids = torch.randint(1, 50, (2, 10))
        batches.append({"input_ids": ids, "labels": ids, **({"attention_mask": torch.ones_like(ids)} if mask else {})})
    return batches


def _causal(kind: str, **sizes: Any) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            **{**_SMALL, "vocab_size": 50, "num_key_value_heads": 1, "pad_token_id": 0, **sizes}
        )
        name = "ForCausalLM"
        _train(run, getattr(transformers, f"{kind.removesuffix('Text')}{name}")(config), _tokens(mask=True))

    return program


def bert(run: Run) -> None:
    """Train BERT to classify sentences."""
    from transformers import BertConfig, BertForSequenceClassification

    batches = [{"input_ids": torch.randint(50, (4, 8)), "labels": torch.randint(2, (4,))} for _ in range(STEPS)]
    _train(run, BertForSequenceClassification(BertConfig(**_SMALL, vocab_size=50)), batches)


def deberta(run: Run) -> None:
    """Train DeBERTa to classify sentences; its forward looks at the values of the labels."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        **_SMALL, vocab_size=50, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    )
    batches = [{"input_ids": torch.randint(50, (4, 8)), "labels": torch.randint(2, (4,))} for _ in range(STEPS)]
    _train(run, DebertaV2ForSequenceClassification(config), batches)


def wav2vec2(run: Run) -> None:
    """Train Wav2Vec2 with masked spectra and the connectionist loss."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        **_SMALL, vocab_size=12, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_length=2, mask_time_prob=0.2,
    )  # fmt: skip
    batches = [{"input_values": torch.randn(2, 400), "labels": torch.randint(1, 12, (2, 5))} for _ in range(STEPS)]
    import numpy as np

    np.random.seed(0)
    _train(run, Wav2Vec2ForCTC(config), batches)


def t5(run: Run) -> None:
    """Train T5 on pairs of sequences."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
    batches = [{"input_ids": torch.randint(50, (2, 9)), "labels": torch.randint(50, (2, 7))} for _ in range(STEPS)]
    _train(run, T5ForConditionalGeneration(config), batches)


def peft_lora(run: Run) -> None:
    """Train adapters of a frozen Llama."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(LlamaConfig(**_SMALL, vocab_size=50, num_key_value_heads=1))
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    _train(run, get_peft_model(base, config), _tokens(mask=True))


class Block(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT, smaller, with tied weights: its forward returns logits and the loss, or None without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.h = nn.ModuleList([Block(32), Block(32)])
        self.ln_f, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def nanogpt(run: Run) -> None:
    """Train a nanoGPT with two micro-batches for each update and a learning rate that warms up, then generate."""
    net = NanoGPT()
    decay, rest = ([p for p in net.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups: list[dict[str, Any]] = [{"params": decay, "weight_decay": 0.1}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    data = torch.randint(50, (STEPS, 2, 2, 13))
    inputs, targets = data[..., :-1].contiguous(), data[..., 1:].contiguous()
    model = run.compile(net, inputs[0, 0], targets[0, 0])
    for i in run.steps(range(STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (i + 1) / STEPS * (0.5 + 0.5 * math.cos(i / STEPS))
        for x, y in zip(inputs[i], targets[i], strict=True):
            _, loss = model(x, y)
            (loss / 2).backward()
            run.loss(loss)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    tokens = data[0, 0, :1, :3]
    with torch.no_grad():
        for _ in range(3):
            logits, _ = model(tokens)
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
    run.result("generated", tokens)
    run.state(net)


def trainer_loop(run: Run) -> None:
    """Train BERT as the Trainer of transformers does, without it: columns that the model does not name are dropped, its
    class says which are labels, and the evaluation reads the loss and the logits."""
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils.generic import find_labels

    net = BertForSequenceClassification(BertConfig(**_SMALL, vocab_size=50))
    data = [{"input_ids": torch.randint(50, (8,)), "labels": i % 2, "source": i} for i in range(8 * STEPS + 3)]
    ids = torch.zeros(8, 8, dtype=torch.long)
    model = run.compile(net, input_ids=ids, labels=ids[:, 0])
    labels = find_labels(type(model))
    known = inspect.signature(model.forward).parameters

    def collate(rows: list[dict[str, Any]]) -> Batch:
        columns = [key for key in rows[0] if key in known]
        return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in columns}

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for i in run.steps(range(STEPS)):
        model.train()
        batch = collate(data[8 * i : 8 * (i + 1)])
        outputs = model(**batch)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        loss.backward()
        run.result(f"norm {i}", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        schedule.step()
        model.zero_grad()
        run.loss(loss)
    model.eval()
    for first in range(0, len(data), 16):  # the last batch is smaller
        batch = collate(data[first : first + 16])
        with torch.no_grad():
            outputs = model(**batch)
        run.result(f"test {first}", [outputs.loss, *outputs[1:], *(batch[key] for key in labels if key in batch)])
    run.state(net)


def decoder_cache(run: Run) -> None:
    """Train a decoder whose outputs have a cache that nobody reads, and generate with the cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SMALL, vocab_size=50, num_key_value_heads=1, pad_token_id=0, use_cache=True)
    net = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    batches = _tokens()
    model = run.compile(net, **batches[0])
    for batch in run.steps(batches):
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.loss(outputs.loss)
    model.eval()
    tokens, cache = batches[0]["input_ids"][:, :4], None
    with torch.no_grad():
        for _ in range(4):
            outputs = model(input_ids=tokens, past_key_values=cache)
            tokens, cache = outputs.logits[:, -1:].argmax(-1), outputs.past_key_values
            run.result(f"token {cache.get_seq_length()}", (tokens, outputs.logits))
    run.state(net)


_HF = ("transformers",)
PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "nanogpt": Program(run=nanogpt, ways=NO_STEP),
        "bert": Program(run=bert, libraries=_HF),
        "llama": Program(run=_causal("Llama"), libraries=_HF),
        "gemma3": Program(run=_causal("Gemma3Text", head_dim=16), libraries=_HF),
        "phi3": Program(run=_causal("Phi3"), libraries=_HF),
        "deberta": Program(run=deberta, libraries=_HF),
        "wav2vec2": Program(run=wav2vec2, libraries=_HF),
        "t5": Program(run=t5, libraries=_HF),
        "trainer_loop": Program(run=trainer_loop, libraries=_HF, ways=NO_STEP),
        "decoder_cache": Program(run=decoder_cache, libraries=_HF, ways=NO_STEP),
        "peft_lora": Program(run=peft_lora, libraries=("transformers", "peft")),
    }
)
