"""Which adapters vLLM serves as peft computes them: accepted, converted first, or refused.

The rules are those of vLLM 0.32's loader (`vllm/lora/peft_helper.py`, `lora_model.py`, `utils.py`). It loads an adapter
in three steps, and only the first two end with an error:

1. `adapter_config.json` is read. DoRA, bias, `modules_to_save` and PiSSA are errors. 0.32 reads both patterns. They are
   folded all the same, so that an adapter does not depend on the release that serves it.
2. Each tensor's last name must be a layer that can have an adapter. Otherwise loading ends with an error.
3. Each tensor finds its layer by its whole path. vLLM ignores a path that its model does not have.

Pure: reads what it is given, no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune.model.text_part import PEFT_PREFIX
from finetune.untrusted.safetensors_header import TensorFacts

VLLM = "0.32"  # the release that these rules were read from and tried with
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, MaxLoRARanks
MOST_ROWS_OF_HEAD = 258_048  # vllm/lora/layers/logits_processor.py
LOADED_ENDINGS = (
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_embedding_A",
    ".lora_embedding_B",
)  # all that the loader reads
# Initialisations after which a saved adapter is plain LoRA. PEFTHelper accepts two more, which no recipe has.
PLAIN_STARTS = ("true", "false", "gaussian", "orthogonal")

# transformers' classes that vLLM serves, but without adapters.
NO_ADAPTERS = frozenset(
    """
    AriaForConditionalGeneration BloomForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration
    DbrxForCausalLM DeepseekV4ForCausalLM FalconForCausalLM FalconMambaForCausalLM GPT2LMHeadModel GPTJForCausalLM
    Gemma3nForCausalLM Gemma3nForConditionalGeneration HrmTextForCausalLM KimiLinearForCausalLM
    LlavaOnevisionForConditionalGeneration Mamba2ForCausalLM MambaForCausalLM MiMoV2FlashForCausalLM
    MiniMaxM3SparseForConditionalGeneration PaddleOCRVLForConditionalGeneration StableLmForCausalLM
    Step3p7ForConditionalGeneration Zamba2ForCausalLM
    """.split()
)
# Classes with adapters on embeddings and head too (`embedding_modules`).
ENDS = ("embed_tokens", "lm_head")
ENDS_TOO = frozenset(
    """
    ApertusForCausalLM Ernie4_5ForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconH1ForCausalLM
    GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM
    HyperCLOVAXForCausalLM JambaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Llama4ForCausalLM LlamaForCausalLM
    MiniCPM3ForCausalLM MixtralForCausalLM NemotronForCausalLM NemotronHForCausalLM Phi3ForCausalLM Qwen3ForCausalLM
    Qwen3MoeForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
    """.split()
)
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The layers of classes that differ only in numbers. vLLM checks other classes' layers itself when it loads.
EXPECTED_LAYERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM"), SEVEN),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM"), SEVEN),
    **dict.fromkeys(("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"), SEVEN),
    "Phi3ForCausalLM": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}

# Classes whose checkpoints, and so vLLM's names, have a layer for each expert's gate, up and down projection.
# transformers and peft keep all experts in two parameters. For these classes vLLM 0.32 would cut peft's layout in the
# wrong order (`lora/model_manager.py`, the fallback in `_stack_moe_lora_weights`), without an error.
EXPERTS_BY_NAME = frozenset({"OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"})
EXPERT_LAYER = re.compile(r"\.experts(\.base_layer)?$")  # peft's two wrappers around the two parameters
EXPERT_PARAMETERS = {"gate_up_proj", "down_proj"}

Conversion = Literal["experts", "one rank", "one name"]
WORDS: Mapping[Conversion, str] = {
    "experts": "each expert's gate, up and down projection has an adapter of its own",
    "one rank": "rank_pattern and alpha_pattern are folded into one rank and scale",
    "one name": "each tensor keeps the whole model's name alone",
}


@dataclass(frozen=True)
class ServingVerdict:
    """The checker's answer."""

    refusals: tuple[str, ...]  # each reason, as a clause
    conversions: tuple[Conversion, ...]  # in the order in which they are made
    rank: int  # of the adapter that vLLM gets; 0 if it is refused
    notes: tuple[str, ...]  # true of an adapter that is served

    @property
    def outcome(self) -> Literal["accepted", "converted", "refused"]:
        if self.refusals:
            return "refused"
        if self.conversions:
            return "converted"
        return "accepted"

    @property
    def flags(self) -> list[str]:
        """What `vllm serve` needs beside the base and `--lora-modules`."""
        return ["--enable-lora", "--max-lora-rank", str(next(rank for rank in RANKS if rank >= self.rank))]


def judge_for_vllm(
    settings: Mapping[str, Any],
    tensors: Mapping[str, TensorFacts],
    config: Mapping[str, Any],
    *,
    quantized: bool = False,
) -> ServingVerdict:
    """Whether vLLM serves this adapter, and after which conversions.

    Args:
        settings: adapter_config.json.
        tensors: The header of adapter_model.safetensors.
        config: The base's config.json.
        quantized: The adapter was trained over a base that was quantised when it was loaded.
    """
    init, architecture = str(settings.get("init_lora_weights", True)).lower(), architecture_of(config)
    refusals = [*_refused_settings(settings, architecture), *_refused_tensors(tensors, config)]
    if architecture in NO_ADAPTERS:
        refusals.append(f"vLLM {VLLM} has no adapters for {architecture}")
    elif architecture in ENDS_TOO and (config.get("vocab_size") or 0) > MOST_ROWS_OF_HEAD:
        refusals.append(f"vLLM {VLLM} takes adapters for at most {MOST_ROWS_OF_HEAD:,} tokens, and the base has more")

    conversions: list[Conversion] = []
    no_matrix = [key for key, facts in tensors.items() if key.endswith(LOADED_ENDINGS) and len(facts.shape) != 2]
    refusals += [f"{key} is no matrix" for key in no_matrix[:1]]
    of_experts = settings.get("target_parameters") and architecture in EXPERTS_BY_NAME
    if of_experts:
        conversions.append("experts")  # their tensors have the rank times the number of experts
    firsts = [
        facts
        for key, facts in tensors.items()
        if key.endswith((".lora_A.weight", ".lora_embedding_A")) and not (of_experts and _is_of_experts(key))
    ]
    ranks = {facts.shape[0] for facts in firsts if facts.shape}
    if of_experts:
        ranks.add(int(settings.get("r") or 0))
    rank = max([0, *ranks])
    if init not in PLAIN_STARTS:
        refusals.append(f"init_lora_weights: {init} changes the base when peft loads the adapter")
    by_pattern = bool(settings.get("rank_pattern") or settings.get("alpha_pattern"))
    if of_experts and by_pattern:
        refusals.append("target_parameters beside a pattern have no form that vLLM reads")
    if by_pattern:
        conversions.append("one rank")
    if len(whole_names(tensors)) < len(tensors):
        conversions.append("one name")
    if not ranks:
        refusals.append("the adapter holds no LoRA tensor")
    elif rank > RANKS[-1]:
        refusals.append(f"its rank is {rank}, and vLLM's --max-lora-rank ends at {RANKS[-1]}")
    strange = sorted(key for key in tensors if not key.endswith(LOADED_ENDINGS))
    if strange and not refusals:
        refusals.append(f"vLLM {VLLM} does not know what {strange[0].removeprefix(PEFT_PREFIX)} is")
    if not by_pattern and ranks - {settings.get("r")} and not refusals:
        refusals.append(f"r is {settings.get('r')}, and its tensors have rank {max(ranks)}")
    if refusals:
        return ServingVerdict(tuple(refusals), (), 0, ())

    notes = []
    if quantized:
        notes.append(
            "it was trained over the quantised base, and vLLM adds it to the base's own weights; finetune merge "
            "measures how much that changes"
        )
    if architecture not in EXPECTED_LAYERS:
        notes.append(f"layer names of {architecture} are checked by vLLM when it loads the adapter")
    return ServingVerdict((), tuple(conversions), rank, tuple(notes))


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first class in config.json, by which vLLM chooses its own."""
    return str(next(iter(config.get("architectures") or []), "a base without `architectures`"))


def whole_names(keys: Iterable[str]) -> list[str]:
    """The keys without those that a text part's adapter repeats under its own name.

    A text part's adapter holds each tensor under two names, so that peft loads it onto the text part and onto the whole
    model (model/text_part.py). vLLM serves the whole model:

        model.layers.0.mlp.up_proj                    the text part: dropped
        model.language_model.layers.0.mlp.up_proj     the whole model: kept
    """
    every = list(keys)
    repeated = {key.replace("language_model.", "", 1) for key in every if "language_model." in key}
    return [key for key in every if key not in repeated]


def _is_of_experts(key: str) -> bool:
    """Whether this tensor is the adapter of a parameter that holds all experts."""
    return EXPERT_LAYER.search(key.partition(".lora_")[0]) is not None


def _refused_settings(settings: Mapping[str, Any], architecture: str) -> list[str]:
    """Settings that change what an adapter computes, and that vLLM does not implement."""
    refusals = []
    if settings.get("use_dora"):
        refusals.append("use_dora: DoRA scales each weight's rows, and no low-rank sum does that")
    if saved := settings.get("modules_to_save"):
        refusals.append(f"modules_to_save: {', '.join(saved)} was trained in full, and vLLM loads no such weights")
    if settings.get("trainable_token_indices"):
        refusals.append("rows of new tokens were trained, and vLLM loads no such rows")
    if parameters := settings.get("target_parameters"):
        adapted = {name.rpartition(".")[2] for name in parameters}
        if architecture not in EXPERTS_BY_NAME:
            refusals.append(
                f"target_parameters: {', '.join(sorted(parameters))}: vLLM reads experts in peft's layout for few "
                "mixtures, and has passed over them without an error in others"
            )
        elif adapted != EXPERT_PARAMETERS:
            refusals.append(
                f"target_parameters: {', '.join(sorted(parameters))}: vLLM takes adapters on all projections of the "
                "experts"
            )
    if settings.get("bias", "none") != "none" or settings.get("lora_bias"):
        refusals.append("biases were trained, and vLLM loads none")
    for key in ("layer_replication", "use_bdlora", "use_qalora", "alora_invocation_tokens"):
        if settings.get(key):
            refusals.append(f"{key} is not known to vLLM")
    return refusals


def _refused_tensors(tensors: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Layers that vLLM does not expect. Tensors that follow from refused settings are left to `_refused_settings`."""
    architecture = architecture_of(config)
    paths = {
        key.removeprefix(PEFT_PREFIX)[: -len(end)] for key in tensors for end in LOADED_ENDINGS if key.endswith(end)
    }
    names = {path.rpartition(".")[2] for path in paths if not EXPERT_LAYER.search(path)}
    refusals = []
    if unknown := sorted(names & {*ENDS} if architecture not in ENDS_TOO else ()):
        refusals.append(f"vLLM {VLLM} has no adapter on {' and '.join(unknown)} for {architecture}")
    if architecture in EXPECTED_LAYERS and (unknown := sorted(names - {*EXPECTED_LAYERS[architecture], *ENDS})):
        refusals.append(f"vLLM {VLLM} knows no layer {' or '.join(unknown)} in {architecture}")
    return refusals
