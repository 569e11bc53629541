"""What a run hands over loads in plain peft and plain transformers, with the same logits."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from finetune.base.identity import BASE_CONTENT
from finetune.errors import EnvironmentMismatch
from finetune.run_folder.checkpoint import newest_valid, read_checkpoint, write_checkpoint
from finetune.run_folder.save_restore import export_adapter, export_model
from finetune.run_folder.trained_tensors import load_model, load_optimizer, model_tensors, optimizer_tensors
from finetune.strategies.assemble import Assembled

# peft asks transformers by a name that its new releases have renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

IDS = torch.tensor([[1, 5, 3, 9, 30]])


def llama(*, tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<s>", "</s>", "a", "b"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")), eos_token="</s>", bos_token="<s>"
    )


def weights_of(model: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return Assembled(model, model, None).trained_weights(dtype=dtype, keep=True)


def adapted(base: PreTrainedModel, **settings: Any) -> PeftModel:
    """Adapters that have moved away from where they began."""
    settings = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings
    model = get_peft_model(base, LoraConfig(**settings))
    assert isinstance(model, PeftModel)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return result


@pytest.mark.sample(2, thorough=6)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "v_proj"]},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
    ],
    ids=str,
)
def test_the_adapter_loads_in_plain_peft_with_the_same_logits(tmp_path: Path, settings: dict[str, Any]) -> None:
    llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = adapted(base, **settings)
    folder = export_adapter(model, weights_of(model), tokenizer(), tmp_path, base="someone/some-model")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/some-model"
    assert (folder / "adapter_model.safetensors").is_file()
    assert not [path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder).eval()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "</s>"


def test_exporting_again_replaces_the_folder(tmp_path: Path) -> None:
    model = adapted(llama())
    folder = export_adapter(model, weights_of(model), tokenizer(), tmp_path, base="b")
    (folder / "stale.txt").write_text("")
    export_adapter(model, weights_of(model), tokenizer(), tmp_path, base="b")
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_adapter_names_its_base_by_commit_and_content(tmp_path: Path) -> None:
    model, base = adapted(llama()), {"commit": "1" * 40, "content": "abc"}
    written = []
    for name in ("a", "b"):
        folder = export_adapter(model, weights_of(model), tokenizer(), tmp_path / name, base="me/b", rests_on=base)
        assert json.loads((folder / "adapter_config.json").read_text())["revision"] == "1" * 40
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", BASE_CONTENT: "abc"}
        written.append((folder / "adapter_model.safetensors").read_bytes())
    assert written[0] == written[1]
    again = PeftModel.from_pretrained(llama(), folder).eval()
    torch.testing.assert_close(logits(again), logits(model.eval()))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_loads_in_plain_transformers(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    model = llama(tied=tied).eval()
    folder = export_model(model, weights_of(model, dtype), tokenizer(), tmp_path, dtype=dtype)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert again.dtype == dtype
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    expected = logits(model.to(dtype))
    assert logits(again).equal(expected)
    assert not list(folder.glob("*.bin"))
    assert AutoTokenizer.from_pretrained(folder).eos_token == "</s>"


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adapters_and_their_optimizer_continue_bitwise(tmp_path: Path) -> None:
    def start() -> tuple[PeftModel, torch.optim.AdamW]:
        model = adapted(llama())
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    model, optimizer = start()
    train(model, optimizer, 2)
    tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
    assert all("lora_" in name for name in tensors["model"])
    write_checkpoint(tmp_path, 2, tensors, {}, keep=1)
    expected = train(model, optimizer, 3)

    resumed, again = start()
    newest, _ = newest_valid(tmp_path)
    assert newest is not None
    groups, _ = read_checkpoint(newest)
    load_model(resumed, groups["model"])
    load_optimizer(resumed, again, groups["optimizer"])
    assert train(resumed, again, 3) == expected
    left, right = model_tensors(model), model_tensors(resumed)
    assert all(left[name].equal(right[name]) for name in left)


def test_the_optimizer_inside_accelerates_wrapper() -> None:
    from accelerate import Accelerator

    model = llama()
    wrapped = Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, wrapped, 2)
    saved = {name: value.clone() for name, value in optimizer_tensors(model, wrapped).items()}
    train(model, wrapped, 1)
    load_optimizer(model, wrapped, saved)
    again = optimizer_tensors(model, wrapped)
    assert saved.keys() == again.keys()
    assert all(saved[name].equal(again[name]) for name in saved)


@pytest.mark.parametrize(
    "error",
    [Exception("File too large (os error 27)"), OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
    ids=["tokenizers", "disk", "ctrl-c"],
)
def test_half_an_export_is_removed(tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's own writer raises no OSError; its words hold the number."""

    def save(folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("half")
        raise error

    model, own = adapted(llama()), tokenizer()
    monkeypatch.setattr(own, "save_pretrained", save)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EnvironmentMismatch
    with pytest.raises(expected) as caught:
        export_adapter(model, weights_of(model), own, tmp_path, base="b")
    assert list(tmp_path.iterdir()) == []
    if expected is EnvironmentMismatch:
        assert "adapter: could not be written: " in str(caught.value)
        assert "checkpoints are intact" in str(caught.value)
