"""Captum: integrated gradients, or gradient x input, of a logit at the last token, from the embeddings."""

from captum.attr import InputXGradient, IntegratedGradients
from common import load_model, measure, read_job, write_result

job = read_job()
model, ids = load_model(job)
embedded = model.get_input_embeddings()(ids).detach()


def forward(x):
    return model(inputs_embeds=x, logits_to_keep=1).logits[:, -1]


def compute():
    if job["method"] == "integrated_gradients":
        found, _ = IntegratedGradients(forward).attribute(
            embedded, target=job["target"], n_steps=50, return_convergence_delta=True
        )
    else:
        found = InputXGradient(forward).attribute(embedded.requires_grad_(), target=job["target"])
    return found[0].sum(-1).tolist()


scores, cost = measure(job, compute)
write_result({"scores": scores, **cost})
