"""Inseq: input x gradient of a logit at the last token."""

import inseq
import torch
from common import measure, read_job, write_result
from inseq.models.huggingface_model import HuggingfaceDecoderOnlyModel
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMES = {"gradient_x_input": "input_x_gradient"}  # as Inseq calls them
torch.set_num_threads(1)
job = read_job()
tokenizer = AutoTokenizer.from_pretrained(job["model"])
model = inseq.load_model(
    AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32), NAMES[job["method"]], tokenizer=tokenizer
)
assert isinstance(model, HuggingfaceDecoderOnlyModel)
text = tokenizer.decode(job["ids"], skip_special_tokens=True)
written = text + tokenizer.decode([*job["ids"], job["target"]], skip_special_tokens=True)[len(text) :]


def compute():
    found = model.attribute(text, written, show_progress=False, pretty_progress=False, attributed_fn="logit")
    return found.sequence_attributions[0].target_attributions[: len(job["ids"]), 0].sum(-1).tolist()


scores, cost = measure(job, compute)
write_result({"scores": scores, **cost})
