"""Configurations of transformers: their steps on the meta device, and files that are no configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from memplan.errors import InvalidModel, InvalidSize, UnreadableFile
from memplan.trace.capture.effects import with_fake_tensors
from memplan.trace.model_config import ConfigModel, model_of_config

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "intermediate_size": 64}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **SMALL}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 32,
      "num_layers": 1, "num_heads": 2, "vocab_size": 64}  # fmt: skip
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, **SMALL}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 24, **SMALL}
WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 32,
           "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
           "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64, "max_source_positions": 20,
           "max_target_positions": 12, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1}  # fmt: skip


def made(folder: Path, data: Any, **options: Any) -> ConfigModel:
    (folder / "config.json").write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return model_of_config(folder / "config.json", **options)


@pytest.mark.parametrize(
    ("data", "options", "expected", "shapes"),
    [
        (LLAMA, {}, (2048, "bfloat16"), [(3, 2048)]),
        (LLAMA, {"length": 16, "dtype": "float32"}, (16, "float32"), [(3, 16)]),
        (T5, {"length": 8}, (8, "float32"), [(3, 8), (3, 8)]),
        (BERT, {}, (24, "float32"), [(3, 24), (3, 24)]),
        (VIT, {}, (0, "float32"), [(3, 3, 32, 32), (3,)]),
        (WHISPER, {}, (12, "float32"), [(3, 8, 40), (3, 12)]),
    ],
)
def test_a_configuration_is_a_step_without_bytes(
    tmp_path: Path, data: Any, options: dict[str, Any], expected: tuple[int, str], shapes: list[tuple[int, ...]]
) -> None:
    found = made(tmp_path, data, **options)
    model, inputs = found.make(3)
    assert (found.name, found.length, found.dtype) == (data["architectures"][0], *expected)
    assert [tuple(x.shape) for x in inputs] == shapes
    assert all(t.is_meta for t in (*model.parameters(), *inputs))
    assert {p.dtype for p in model.parameters()} == {getattr(torch, expected[1])}
    model, inputs = with_fake_tensors(model, inputs, "cpu")
    with torch.no_grad():
        assert model(*inputs).shape == ()  # one loss


def test_a_folder_is_its_configuration_and_its_step_is_planned(tmp_path: Path) -> None:
    made(tmp_path, LLAMA)
    found = model_of_config(tmp_path, length=16)
    answer = memplan.fits(found.make, device="64MiB", batch=2, search=False)
    assert answer.fits
    assert answer.need.state == 2 * sum(p.nbytes for p in found.model.parameters())


@pytest.mark.parametrize(
    ("data", "options", "error", "what"),
    [
        ("{", {}, UnreadableFile, "not JSON"),
        ("[" * 100_000, {}, UnreadableFile, "not JSON"),
        ("[]", {}, InvalidModel, "no model_type"),
        ({"hidden_size": 4}, {}, InvalidModel, "no model_type"),
        ({**LLAMA, "model_type": "../llama"}, {}, InvalidModel, r"does not take it: [^\n,]*\.\./llama\.\n"),
        ({**LLAMA, "hidden_size": "wide"}, {}, InvalidModel, "transformers"),
        ({**LLAMA, "hidden_size": -8}, {}, InvalidModel, "transformers"),
        ({**LLAMA, "architectures": None}, {}, InvalidModel, "--architecture"),
        ({**LLAMA, "architectures": ["LlamaModel"]}, {}, InvalidModel, "loss"),
        ({**LLAMA, "architectures": ["os.systemForCausalLM"]}, {}, InvalidModel, "cannot make it"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, {}, InvalidModel, "quantized"),
        (LLAMA, {"architecture": "AutoModelForCausalLM"}, InvalidModel, "is no model"),
        (BERT, {"length": 25}, InvalidSize, "from 2 to 24"),
        (LLAMA, {"length": 1}, InvalidSize, "sequence"),
        (LLAMA, {"dtype": "int64"}, InvalidSize, "floating-point"),
    ],
)
def test_what_is_no_configuration(
    tmp_path: Path, data: Any, options: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        made(tmp_path, data, **options)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="cannot be read"):
        model_of_config(tmp_path / "nothing.json")
    with pytest.raises(UnreadableFile, match=r"config\.json"):
        model_of_config(tmp_path)
