"""Write stories that a language model makes up, one a line: `python -m docs.make_stories MODEL FILE [COUNT]`.

A model that was trained on stories is best asked about stories. Each begins with another hero; the words are drawn by a
fixed seed, so that the same model writes the same file.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

KINDS = ("little", "big", "brave", "shy", "happy", "old", "clever", "lonely", "funny", "tired")
HEROES = ("girl named Lily", "boy named Tim", "cat", "dog", "bird", "rabbit", "farmer", "queen", "bear", "fish")
LENGTH = 40  # tokens that are added to the beginning


def main(model_name: str, path: Path, count: int = 100) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_name).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    lines = []
    for kind, hero in list(product(KINDS, HEROES))[:count]:
        given = tokenizer(f"Once upon a time there was a {kind} {hero}.", return_tensors="pt")
        made = model.generate(**given, max_new_tokens=LENGTH, do_sample=True, temperature=0.8, top_k=50)
        lines.append(" ".join(tokenizer.decode(made[0], skip_special_tokens=True).split()))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
