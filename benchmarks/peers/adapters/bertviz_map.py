"""BertViz: the attention weights that its views show, mean over heads."""

from bertviz.util import format_attention
from common import load_model, measure, read_job, write_result

job = read_job()
model, ids = load_model(job, attention="eager")


def compute():
    given = model(ids, output_attentions=True).attentions
    return format_attention(given).mean(1).tolist()


maps, cost = measure(job, compute)
write_result({"scores": maps, **cost})
