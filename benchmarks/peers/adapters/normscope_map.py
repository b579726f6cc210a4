"""normscope: the maps of a scope, mean over heads where it has heads."""

from common import load_model, measure, read_job, write_result

from normscope import Analyzer

job = read_job()
model, ids = load_model(job)
lens = Analyzer(model)


def compute():
    return lens.analyze({"input_ids": ids}, scopes=[job["method"]])[job["method"]].tolist()


maps, cost = measure(job, compute)
write_result({"scores": maps, **cost})
