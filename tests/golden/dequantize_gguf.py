"""Copy a GGUF file with every tensor in float32, so that llama.cpp computes in float32 too.

pip install gguf
python tests/golden/dequantize_gguf.py IN.gguf OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np


def dequantize(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    skip = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, entry in reader.fields.items():
        if name in skip or name.startswith("GGUF."):
            continue
        element = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
