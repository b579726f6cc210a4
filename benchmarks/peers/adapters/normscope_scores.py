"""normscope: the scores of the input tokens for a logit, by the method of the job."""

from common import load_model, measure, read_job, write_result

from normscope import Analyzer

job = read_job()
model, ids = load_model(job)
lens = Analyzer(model)


def compute():
    return lens.flow({"input_ids": ids}, method=job["method"], target=job["target"]).scores.tolist()


scores, cost = measure(job, compute)
write_result({"scores": scores, **cost})
