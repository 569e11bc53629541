"""Did a run export the weights that it trained? The plain libraries load them and compare with the last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.recipe.schema import Recipe
from finetune.wording import counted


def load_back(recipe: Recipe, run_dir: Path) -> str:
    """Load the adapter in plain peft, or the model in plain transformers, in float32; return the result as a line.

    Weights and logits must equal the exported step's checkpoint bitwise, in the export's number format. They must
    differ from the base model's. Raises FinetuneError if they do not.
    """
    import torch

    from finetune.run_folder.checkpoint import examine, read_checkpoint, step_folder

    folder = step_folder(run_dir, json.loads((run_dir / "receipt.json").read_text("utf-8"))["export"]["step"])
    checkpoint = examine(folder)
    if isinstance(checkpoint, str):
        raise FinetuneError(f"{folder}: {checkpoint}")
    trained = read_checkpoint(checkpoint)[0]["model"]
    if recipe.lora is not None:
        # With other settings than the recipe's, the filled model would have a wrong scale as well.
        file = run_dir / "adapter" / "adapter_config.json"
        stated = json.loads(file.read_text("utf-8"))
        for key in ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
            if stated[key] != getattr(recipe.lora, key):
                raise FinetuneError(
                    f"export: {file.name}: {key} is {stated[key]}, the recipe says {getattr(recipe.lora, key)}"
                )
    base, tuned, expected = _models(recipe, run_dir)
    dtype = None if recipe.lora else getattr(torch, recipe.model.dtype)
    exported = dict(tuned.named_parameters(remove_duplicate=False))
    rounded = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in trained.items()}
    wrong = [
        name
        for name, tensor in rounded.items()
        if name not in exported or not torch.equal(exported[name].detach(), tensor.float())
    ]
    if wrong:
        raise FinetuneError(
            f"export: {len(wrong)} of {len(trained)} tensors differ from the checkpoint, first {wrong[0]}"
        )
    parameters = dict(expected.named_parameters(remove_duplicate=False))
    for name, tensor in rounded.items():
        parameters[name].data.copy_(tensor)
    if dtype is not None:
        base = base.to(dtype).float()  # else the rounding alone would be a difference
    ids = torch.arange(3, 67).reshape(2, 32)
    with torch.no_grad():
        before, after, filled = (model.eval()(input_ids=ids).logits for model in (base, tuned, expected))
    if not torch.equal(after, filled):
        raise FinetuneError(f"export: logits differ from the checkpoint's by {(after - filled).abs().max().item():.2e}")
    if torch.equal(after, before):
        raise FinetuneError("export: logits are those of the base; nothing was learned")
    library = "peft" if recipe.lora else "transformers"
    return f"by plain {library}: {counted(len(trained), 'tensor')} and the logits equal the checkpoint's"


def _models(recipe: Recipe, run_dir: Path) -> tuple[Any, Any, Any]:
    """The base, the export, and a model of that structure to fill; each is built by the libraries alone."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.model.adapters import silenced_peft

    def plain(folder: str | Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)

    def plain_base() -> Any:
        model = plain(recipe.model.name_or_path)
        if recipe.model.new_tokens:  # as the model card has it
            tokenizer = AutoTokenizer.from_pretrained(run_dir / ("adapter" if recipe.lora else "model"))
            rows = max(len(tokenizer), model.get_input_embeddings().num_embeddings)
            model.resize_token_embeddings(rows, mean_resizing=False)
        return model

    base = plain_base()
    if recipe.lora is None:
        return base, plain(run_dir / "model"), plain_base()
    adapter = run_dir / "adapter"
    with silenced_peft():
        tuned = PeftModel.from_pretrained(plain_base(), adapter)
        filled = get_peft_model(plain_base(), LoraConfig.from_pretrained(str(adapter)))
    return base, tuned, filled
